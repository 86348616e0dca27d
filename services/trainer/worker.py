"""A trainer worker: owns a device and no policy, until policies are bound to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.binding import Binding
from services.trainer.bindings import Bindings, Key
from services.trainer.checkpoint import checkpoint_path
from services.trainer.compute import Compute, Usage, choose_device, memory_of
from services.trainer.foreign import ForeignStates
from services.trainer.gang.gangs import Gangs
from services.trainer.members import Members
from services.trainer.policy_model import import_transformers
from services.trainer.residence import Residence
from services.trainer.settings import TrainerSettings
from services.trainer.specification import spec_with
from services.trainer.steps import Steps
from services.trainer.swaps import Swaps
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, NotFound, connect
from troupe.v1 import common_pb2 as pb
from troupe.v1 import (
    experience_store_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    trainer_pb2,
)

log = structlog.get_logger("troupe.trainer")

T = TypeVar("T")
# How long ranks may take to leave, and then to be made to.
_GANG_SECONDS = 8.0


class TrainerWorker:
    """Bindings by (job, policy), and the steps that they run."""

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._device = choose_device(settings.trainer_device)
        self._compute = Compute(settings.threads, self._device)
        self._transfer = HostTransfer(settings, telemetry)
        self._foreign = ForeignStates(self._transfer, settings)
        self._residence = Residence(self._device)
        self._gangs = Gangs(settings)
        self.bindings = Bindings(self._new_binding)
        self._steps = Steps(settings, self._compute, telemetry)
        self._members = Members(self._transfer, settings.data_dir)
        self._swaps = Swaps(self.bindings, self._steps, self._compute, telemetry)
        self._usage = Usage()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Open channels (nothing is called yet) and warm up."""
        settings = self._settings
        store = connect(settings.experience_store_address, settings.client())
        orchestrator = connect(settings.orchestrator_address, settings.client())
        await self._exit.enter_async_context(store)
        await self._exit.enter_async_context(orchestrator)
        self._steps.connect(
            experience_store_pb2_grpc.ExperienceStoreStub(store),
            orchestrator_pb2_grpc.OrchestratorStub(orchestrator),
        )
        await self._transfer.start()
        self._spawn(self._compute.run(import_transformers))

    async def stop(self) -> None:
        """Give all steps up, so that their samples are free at once for another worker."""
        await self._steps.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_gangs()
        await self._transfer.stop()
        await self._exit.aclose()
        self._compute.close()

    async def _end_gangs(self) -> None:
        """Ranks are children: none may be left."""
        ended = asyncio.ensure_future(self._compute.run(self._gangs.close))
        await asyncio.wait({ended}, timeout=_GANG_SECONDS)
        if not ended.done():  # they are at work
            self._gangs.give_up()
            await asyncio.wait({ended}, timeout=_GANG_SECONDS)

    # What the servicer calls.

    async def bind(
        self, job_id: str, policy: str, spec_json: str, version: int, checksum: str
    ) -> Binding:
        """Bind a policy at a version. Repeatable.

        A step that runs from that very version goes on: whoever asks has only forgotten about
        it. Anything else ends it.
        """
        spec = spec_with(policy, spec_json)
        # Loading goes on when the caller's deadline passes, and the next call finds it done.
        return await self._detached(self._bind(job_id, policy, spec, spec_json, version, checksum))

    async def run_step(
        self, job_id: str, policy: str, step: int, version: int, oldest_version: int | None = None
    ) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Start the step, or attach to it when it runs already; see `StepRun.watch`.

        Samples that began under a version before `oldest_version` are not trained.
        """
        key = (job_id, policy)
        async with self.bindings.lock(key):
            binding = self.bindings.find(key)
            if not binding.trainable:
                raise FailedPrecondition(
                    f"policy {policy} is frozen", kind="policy_frozen", field="policy", value=policy
                )
            run = self._steps.join(binding, step, version, oldest_version)
        async for event in run.watch():
            yield event

    async def save_checkpoint(self, job_id: str, policy: str, version: int) -> tuple[str, int]:
        """Path and size of the checkpoint of `version`; training goes on meanwhile."""
        binding = self.bindings.find((job_id, policy))
        return await asyncio.to_thread(binding.checkpoints.save, version)

    def checkpoint(self, job_id: str, policy: str, version: int) -> Path:
        """Where `save_checkpoint` wrote. Raises NotFound of kind "checkpoint_not_found"."""
        path = checkpoint_path(self._settings.data_dir, job_id, policy, version)
        if not path.is_dir():
            raise NotFound(
                f"there is no checkpoint of {policy}@{version} here",
                kind="checkpoint_not_found",
                field="version",
                value=version,
                remedy="Save it first, with the same worker.",
            )
        return path

    async def keep_member(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> tuple[str, int]:
        """`Members.keep`; training goes on meanwhile."""
        binding = self.bindings.find((job_id, policy))
        return await asyncio.to_thread(self._members.keep, binding, version, checksum)

    async def publish_member(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> pb.WeightsRef:
        """`Members.publish`."""
        where = (job_id, policy, version, checksum)
        return await asyncio.to_thread(self._members.publish, *where)

    async def drop_member(self, job_id: str, policy: str, version: int, *, files: bool) -> None:
        """`Members.drop`."""
        where = (job_id, policy, version)
        await asyncio.to_thread(self._members.drop, *where, files=files)

    async def restart(self, job_id: str, policy: str, version: int, checksum: str) -> Binding:
        """`Versions.restart`, also if the caller does not wait for it; no step may run."""
        return await self._detached(self._restart((job_id, policy), version, checksum))

    async def offer_state(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> trainer_pb2.OfferStateResponse:
        """Let a trainer of another host read a committed state of this one's disk."""
        return await asyncio.to_thread(self._foreign.offer, job_id, policy, version, checksum)

    async def keep_state(
        self, job_id: str, policy: str, version: int, offer: trainer_pb2.OfferStateResponse
    ) -> trainer_pb2.KeepStateResponse:
        """Keep a copy of a state that a trainer of another host offers; not one of this host."""
        return await asyncio.to_thread(self._foreign.keep, job_id, policy, version, offer)

    async def suspend(self, job_id: str, policy: str) -> trainer_pb2.SuspendedState:
        """`Swaps.suspend`, also if the caller does not wait for it."""
        return await self._detached(self._swaps.suspend((job_id, policy)))

    async def resume(
        self,
        job_id: str,
        policy: str,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> Binding:
        """`Swaps.resume`, also if the caller does not wait for it."""
        where = ((job_id, policy), spec_with(policy, spec_json), spec_json)
        return await self._detached(self._swaps.resume(*where, version, checksum, state))

    async def prefetch(
        self, job_id: str, policy: str, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        """`Swaps.prefetch`, also if the caller does not wait for it."""
        where = ((job_id, policy), spec_with(policy, spec_json), spec_json)
        await self._detached(self._swaps.prefetch(*where, state))

    async def release(self, job_id: str, policy: str) -> None:
        """Give a policy up, if it is bound here; its committed state is on disk."""
        await self._detached(self._release((job_id, policy)))

    async def delete_states(self, job_id: str) -> None:
        """Delete what this host's memory holds of a job of which nothing is bound any more."""
        await asyncio.to_thread(self._transfer.clear, f"{job_id}/")

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """All bindings, by job and policy."""
        return self.bindings.statuses()

    def heartbeat(self) -> orchestrator_pb2.HeartbeatRequest:
        """What this worker tells the orchestrator every second."""
        busy = [
            f"{status.policy}: {pb.BindingState.Name(status.state)[14:].lower()} "
            f"step {status.step}, {status.samples} samples"
            for status in self.statuses()
            if status.state not in (pb.BINDING_STATE_IDLE, pb.BINDING_STATE_SUSPENDED)
        ]
        return orchestrator_pb2.HeartbeatRequest(
            kind=orchestrator_pb2.WORKER_KIND_TRAINER,
            bindings=self.statuses(),
            doing="; ".join(busy) or ("idle" if self.bindings.bound else "unbound"),
            transfer_address=self._transfer.address,
            trainer=orchestrator_pb2.TrainerDevice(
                slots=self._settings.trainer_slots,
                memory_bytes=memory_of(self._device, self._settings.trainer_memory_bytes),
                device=self._device.type,
                utilization=self._usage.fraction(self._compute.busy_seconds),
            ),
        )

    # How.

    async def _bind(
        self, job_id: str, policy: str, spec: JobSpec, spec_json: str, version: int, checksum: str
    ) -> Binding:
        key, bindings = (job_id, policy), self.bindings
        async with bindings.lock(key):
            old, run = bindings.bound.get(key), self._steps.running(key)
            busy = run is not None and run.starts_from(version)
            if busy and old is not None and _same(old, spec_json, version, checksum):
                if not old.versions.dirty:
                    await self._compute.run(old.versions.ensure_published)
                return old
            await self._steps.cancel(key)
            if old is not None and _matches(old, spec_json, version, checksum):
                await self._compute.run(old.versions.ensure_published)
                return old
            if (parked := bindings.parked.pop(key, None)) is not None:
                await asyncio.to_thread(parked.leave)
            binding = self._new_binding(key, spec, spec_json)
            async with bindings.filling(key, binding, self._compute):
                await self._compute.run(binding.load, version, checksum)
            # The number of threads is part of what deterministic results depend on.
            threads = self._settings.threads
            log.info("bound", job_id=job_id, policy=policy, version=version, threads=threads)
            return binding

    def _new_binding(self, key: Key, spec: JobSpec, spec_json: str) -> Binding:
        return Binding(
            *key,
            spec,
            spec_json,
            self._settings,
            self._transfer,
            self._device,
            self._residence,
            self._foreign.store(*key),
            self._gangs,
        )

    async def _restart(self, key: Key, version: int, checksum: str) -> Binding:
        async with self.bindings.lock(key):
            binding = self.bindings.find(key)
            if not binding.trainable:
                raise FailedPrecondition(
                    f"policy {key[1]} is frozen", kind="policy_frozen", field="policy", value=key[1]
                )
            if self._steps.running(key) is not None:
                raise FailedPrecondition(
                    f"policy {key[1]} is in the middle of a step",
                    kind="step_in_progress",
                    field="policy",
                    value=key[1],
                    remedy="Begin again when its step is over.",
                )
            await self._compute.run(binding.versions.restart, version, checksum)
            return binding

    async def _release(self, key: Key) -> None:
        bindings = self.bindings
        async with bindings.lock(key):
            await self._steps.cancel(key)
            binding, parked = bindings.bound.pop(key, None), bindings.parked.pop(key, None)
            if parked is not None:
                await asyncio.to_thread(parked.leave)
            if binding is not None:
                binding.move(pb.BINDING_STATE_RELEASED)
                await self._compute.run(binding.leave)

    async def _detached(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _matches(binding: Binding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        _same(binding, spec_json, version, checksum)
        and not binding.versions.dirty
        and binding.state == pb.BINDING_STATE_IDLE
    )


def _same(binding: Binding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        binding.spec_json == spec_json
        and binding.version == version
        and (not checksum or binding.weights.checksum == checksum)
    )
