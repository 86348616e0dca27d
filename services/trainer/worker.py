"""A trainer worker: owns a device and no policy, until policies are bound to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.binding import Binding
from services.trainer.checkpoint import checkpoint_path
from services.trainer.claims import StepClaims
from services.trainer.compute import Compute, Usage, choose_device, memory_of
from services.trainer.foreign import ForeignStates
from services.trainer.gang.gangs import Gangs
from services.trainer.policy_model import import_transformers
from services.trainer.residence import Residence
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepRun
from services.trainer.suspension import HalfStep
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError, connect, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import (
    experience_store_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    trainer_pb2,
)

log = structlog.get_logger("troupe.trainer")

T = TypeVar("T")
Key = tuple[str, str]
# The orchestrator learns of a commit in three ways; this one is only the quickest.
_REPORT_SECONDS = 5.0
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
        self._bindings: dict[Key, Binding] = {}
        # Policies that were suspended here, or will be resumed: models without weights.
        self._parked: dict[Key, Binding] = {}
        self._usage = Usage()
        self._runs: dict[Key, StepRun] = {}
        # Binding, releasing and starting a step of one policy exclude each other.
        self._locks: dict[Key, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = contextlib.AsyncExitStack()
        self._store: Any = None
        self._orchestrator: Any = None
        labels = ["job_id", "policy"]
        self._tokens = telemetry.counter("troupe_trainer_tokens", "Tokens trained.", labels)
        self._busy = telemetry.counter("troupe_trainer_busy_seconds", "Computing.", labels)
        self._swap_seconds = telemetry.counter(
            "troupe_trainer_swap_seconds",
            "Devices kept from computing by policies that come and go.",
            [*labels, "what"],
        )
        self._steps = telemetry.counter("troupe_trainer_steps", "Steps.", [*labels, "outcome"])

    async def start(self) -> None:
        """Open channels (nothing is called yet) and warm up."""
        settings = self._settings
        store = connect(settings.experience_store_address, settings.client())
        orchestrator = connect(settings.orchestrator_address, settings.client())
        await self._exit.enter_async_context(store)
        await self._exit.enter_async_context(orchestrator)
        self._store = experience_store_pb2_grpc.ExperienceStoreStub(store)
        self._orchestrator = orchestrator_pb2_grpc.OrchestratorStub(orchestrator)
        await self._transfer.start()
        self._spawn(self._compute.run(import_transformers))

    async def stop(self) -> None:
        """Give all steps up, so that their samples are free at once for another worker."""
        runs = list(self._runs.values())
        await asyncio.gather(*(run.cancel() for run in runs))
        leaving = [asyncio.create_task(run.settled()) for run in runs]
        if leaving:
            await asyncio.wait(leaving, timeout=self._settings.trainer_claim_wait_seconds + 1)
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
        spec = _parse_spec(spec_json)
        _check_policy(spec, policy)
        # Loading goes on when the caller's deadline passes, and the next call finds it done.
        return await self._detached(self._bind(job_id, policy, spec, spec_json, version, checksum))

    async def run_step(
        self, job_id: str, policy: str, step: int, version: int, oldest_version: int | None = None
    ) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Start the step, or attach to it when it runs already; see `StepRun.watch`.

        Samples that began under a version before `oldest_version` are not trained.
        """
        key = (job_id, policy)
        async with self._lock(key):
            binding = self._bound(key)
            if not binding.trainable:
                raise FailedPrecondition(
                    f"policy {policy} is frozen", kind="policy_frozen", field="policy", value=policy
                )
            run = self._runs.get(key)
            if run is not None and not run.done and run.step != step:
                raise FailedPrecondition(
                    f"policy {policy} is in step {run.step}",
                    kind="step_in_progress",
                    field="step",
                    value=step,
                    remedy="Steps of one policy follow each other; wait, or bind it afresh.",
                )
            if run is None or run.done:
                run = self._runs[key] = self._start_run(binding, step, version, oldest_version)
        async for event in run.watch():
            yield event

    async def save_checkpoint(self, job_id: str, policy: str, version: int) -> tuple[str, int]:
        """Path and size of the checkpoint of `version`; training goes on meanwhile."""
        binding = self._bound((job_id, policy))
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

    async def offer_state(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> trainer_pb2.OfferStateResponse:
        """Let a trainer of another host read a committed state of this one's disk."""
        return await asyncio.to_thread(self._foreign.offer, job_id, policy, version, checksum)

    async def keep_state(
        self, job_id: str, policy: str, version: int, offer: trainer_pb2.OfferStateResponse
    ) -> bool:
        """Keep a copy of a state that a trainer of another host offers; False if of this one."""
        return await asyncio.to_thread(self._foreign.keep, job_id, policy, version, offer)

    async def suspend(self, job_id: str, policy: str) -> trainer_pb2.SuspendedState:
        """Free the device of a policy; repeated, it says again where its state is.

        Raises NotFound of kind "not_bound", and as `Binding.suspend`: then it stays bound.
        """
        return await self._detached(self._suspend((job_id, policy)))

    async def resume(
        self,
        job_id: str,
        policy: str,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> Binding:
        """Bind a policy where its suspension stopped. Raises as `Binding.resume`."""
        spec = _parse_spec(spec_json)
        _check_policy(spec, policy)
        where = ((job_id, policy), spec, spec_json)
        return await self._detached(self._resume(*where, version, checksum, state))

    async def prefetch(
        self, job_id: str, policy: str, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        """Have a suspended state ready for `resume`. What fails is left to that to tell."""
        spec = _parse_spec(spec_json)
        _check_policy(spec, policy)
        await self._detached(self._prefetch((job_id, policy), spec, spec_json, state))

    async def release(self, job_id: str, policy: str) -> None:
        """Give a policy up, if it is bound here; its committed state is on disk."""
        await self._detached(self._release((job_id, policy)))

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """All bindings, by job and policy."""
        found = self._parked | self._bindings
        return [found[key].status() for key in sorted(found)]

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
            doing="; ".join(busy) or ("idle" if self._bindings else "unbound"),
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
        key = (job_id, policy)
        async with self._lock(key):
            old, run = self._bindings.get(key), self._runs.get(key)
            busy = run is not None and not run.done and run.starts_from(version)
            if busy and old is not None and _same(old, spec_json, version, checksum):
                if not old.versions.dirty:
                    await self._compute.run(old.versions.ensure_published)
                return old
            await self._cancel_run(key)
            if old is not None and _matches(old, spec_json, version, checksum):
                await self._compute.run(old.versions.ensure_published)
                return old
            settings = self._settings
            if (parked := self._parked.pop(key, None)) is not None:
                await asyncio.to_thread(parked.leave)
            binding = self._bindings[key] = self._new_binding(key, spec, spec_json)
            try:
                await self._compute.run(binding.load, version, checksum)
            except BaseException:
                binding.move(pb.BINDING_STATE_RELEASED)
                del self._bindings[key]
                raise
            binding.move(pb.BINDING_STATE_IDLE)
            # The number of threads is part of what deterministic results depend on.
            threads = settings.threads
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

    async def _suspend(self, key: Key) -> trainer_pb2.SuspendedState:
        async with self._lock(key):
            parked = self._parked.get(key)
            if key not in self._bindings and parked is not None and parked.suspended is not None:
                return parked.suspended
            binding, run = self._bound(key), self._runs.get(key)
            half = None if run is None or run.done else await run.suspend()
            if binding.versions.dirty:
                await self._compute.run(binding.versions.reset)
            binding.move(pb.BINDING_STATE_SUSPENDING)
            try:
                state = await asyncio.to_thread(binding.suspend, half)
            except TroupeError:
                binding.move(pb.BINDING_STATE_IDLE)
                if half is not None:  # the step goes on, whoever asks for it
                    self._runs[key] = self._go_on(binding, half)
                raise
            self._runs.pop(key, None)
            self._parked[key] = self._bindings.pop(key)
            binding.move(pb.BINDING_STATE_SUSPENDED)
            self._swapped(binding, "suspend", state.seconds)
            return state

    async def _resume(
        self,
        key: Key,
        spec: JobSpec,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> Binding:
        async with self._lock(key):
            old = self._bindings.get(key)
            if old is not None and old.resumed_from == state.checksum:
                return old
            await self._cancel_run(key)
            binding = self._shell(key, spec, spec_json)
            binding.move(pb.BINDING_STATE_BINDING)
            self._bindings[key] = binding
            before = binding.swap_seconds
            try:
                await self._compute.run(binding.resume, state, version, checksum)
            except BaseException:
                binding.move(pb.BINDING_STATE_RELEASED)
                del self._bindings[key]
                raise
            finally:
                self._parked.pop(key, None)
            binding.move(pb.BINDING_STATE_IDLE)
            self._swapped(binding, "resume", binding.swap_seconds - before)
            return binding

    async def _prefetch(
        self, key: Key, spec: JobSpec, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        async with self._lock(key):
            if key in self._bindings:
                return
            binding = self._parked[key] = self._shell(key, spec, spec_json)
            if binding.state == pb.BINDING_STATE_BINDING:  # new
                binding.move(pb.BINDING_STATE_RELEASED)
            await asyncio.to_thread(binding.prefetch, state)

    def _shell(self, key: Key, spec: JobSpec, spec_json: str) -> Binding:
        """What was parked here of a policy, if it is of this job as it is now."""
        parked = self._parked.get(key)
        if parked is not None and parked.spec_json == spec_json:
            return parked
        return self._new_binding(key, spec, spec_json)

    def _swapped(self, binding: Binding, what: str, seconds: float) -> None:
        labels = (binding.job_id, binding.policy, what)
        self._swap_seconds.labels(*labels).inc(seconds)
        log.info(what, job_id=binding.job_id, policy=binding.policy, seconds=round(seconds, 4))

    async def _release(self, key: Key) -> None:
        async with self._lock(key):
            await self._cancel_run(key)
            self._runs.pop(key, None)
            binding, parked = self._bindings.pop(key, None), self._parked.pop(key, None)
            if parked is not None:
                await asyncio.to_thread(parked.leave)
            if binding is not None:
                binding.move(pb.BINDING_STATE_RELEASED)
                await self._compute.run(binding.leave)

    async def _cancel_run(self, key: Key) -> None:
        run = self._runs.pop(key, None)
        if run is not None and not run.done:
            await run.cancel()

    def _go_on(self, binding: Binding, half: HalfStep) -> StepRun:
        binding.half = half
        return self._start_run(binding, half.step, half.version, half.oldest_version)

    def _start_run(
        self, binding: Binding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        lease = self._settings.trainer_lease_seconds
        half, binding.half = binding.half, None
        if half is not None and (half.step, half.version) != (step, version):
            half = None  # `StepRun` throws its gradients away

        def make_claims(half: HalfStep | None) -> StepClaims:
            where = (binding.job_id, binding.policy, step, binding.claimant)
            return StepClaims(self._store, *where, lease, half)

        bounds = (step, version, oldest_version)
        run = StepRun(binding, *bounds, make_claims, self._compute, self._settings, half)
        self._spawn(self._after(binding, run))
        return run

    async def _after(self, binding: Binding, run: StepRun) -> None:
        """Count the step and tell the orchestrator."""
        commit = await run.outcome()
        if commit is None:
            return
        labels = (binding.job_id, binding.policy)
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_").lower()
        self._steps.labels(*labels, outcome).inc()
        self._tokens.labels(*labels).inc(commit.metrics.get("tokens", 0.0))
        self._busy.labels(*labels).inc(commit.metrics.get("train/seconds", 0.0))
        request = orchestrator_pb2.ReportCommitRequest(
            request_id=new_id("report"), job_id=binding.job_id, commit=commit
        )
        try:
            await self._orchestrator.ReportCommit(request, timeout=_REPORT_SECONDS)
        except TroupeError as error:
            log.warning("commit not reported", policy=binding.policy, error=str(error))

    def _bound(self, key: Key) -> Binding:
        binding = self._bindings.get(key)
        if binding is None or binding.state == pb.BINDING_STATE_BINDING:
            raise NotFound(
                f"policy {key[1]} of job {key[0]} is not bound to this worker",
                kind="not_bound",
                field="policy",
                value=key[1],
                remedy="Bind it here, or ask the worker that it is bound to.",
            )
        return binding

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _detached(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _parse_spec(text: str) -> JobSpec:
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(
            first["msg"],
            kind="invalid_spec",
            field=".".join(map(str, first["loc"])) or "spec_json",
            remedy="Send the validated specification (JobSpec.model_dump_json).",
        ) from error


def _check_policy(spec: JobSpec, policy: str) -> None:
    if policy not in spec.policies:
        raise InvalidArgument(
            f"the job has no policy '{policy}'",
            field="policy",
            value=policy,
            remedy=f"Known: {', '.join(sorted(spec.policies))}.",
        )


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
