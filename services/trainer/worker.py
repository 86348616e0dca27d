"""A trainer worker: owns a device, to which policies are bound and from which they are released.

`Bindings` holds the worker's policies; `PolicySteps` runs their optimizer steps; `Swaps` suspends
and resumes them; `TrainerWorker` is the interface for the servicer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from services.chassis.heartbeat import given_devices
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.binding import PolicyBinding
from services.trainer.claims import StepClaims
from services.trainer.compute import BusyFraction, Compute, SwapClock, choose_device, memory_of
from services.trainer.frozen_versions import FrozenVersions
from services.trainer.gang.gang import Gangs
from services.trainer.learning.model import import_transformers
from services.trainer.settings import TrainerSettings
from services.trainer.state.checkpoint import checkpoint_path
from services.trainer.state.suspension import ParameterPool, SuspendedStep
from services.trainer.step import StepRun
from services.trainer.versions import RemoteStates
from troupe.devices import find_devices
from troupe.job import JobSpec
from troupe.job.loading import explained
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError, connect
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import (
    experience_store_pb2_grpc,
    orchestrator_pb2,
    trainer_pb2,
)

# (job id, policy).
Key = tuple[str, str]


class Bindings:
    """Table of the policies bound to this worker, and of parked bindings without weights."""

    def __init__(self, make: Callable[[Key, JobSpec, str], PolicyBinding]) -> None:
        """`make`: makes the binding of a policy from its key, the specification, and its JSON."""
        self.bound: dict[Key, PolicyBinding] = {}
        # Parked bindings (learners without weights) of suspended or prefetched policies.
        self.parked: dict[Key, PolicyBinding] = {}
        self._make = make
        self._locks: dict[Key, asyncio.Lock] = {}

    def lock(self, key: Key) -> asyncio.Lock:
        """The lock of one policy, held to bind, release, swap, or start a step."""
        return self._locks.setdefault(key, asyncio.Lock())

    def find(self, key: Key) -> PolicyBinding:
        """The binding of a policy that is loaded. Raises NotFound of kind "not_bound"."""
        binding = self.bound.get(key)
        if binding is None or binding.state == pb.BINDING_STATE_BINDING:
            raise NotFound(
                f"policy {key[1]} of job {key[0]} is not bound to this worker",
                kind="not_bound",
                field="policy",
                value=key[1],
                remedy="Bind it here, or ask the worker that it is bound to.",
            )
        return binding

    def shell(self, key: Key, spec: JobSpec, spec_json: str) -> PolicyBinding:
        """The parked binding of a policy, if its specification is the same; else a new binding."""
        parked = self.parked.get(key)
        if parked is not None and parked.spec_json == spec_json:
            return parked
        return self._make(key, spec, spec_json)

    @contextlib.asynccontextmanager
    async def filling(
        self, key: Key, binding: PolicyBinding, compute: Compute
    ) -> AsyncIterator[None]:
        """Bind the policy for a state that is loaded inside; unbind it if that fails.

        An earlier binding leaves its gang first, whose ranks know policies by key.
        """
        if (before := self.bound.pop(key, None)) is not None:
            await compute.run(before.leave_ranks)
        self.bound[key] = binding
        try:
            yield
        except BaseException as error:
            binding.move(pb.BINDING_STATE_RELEASED)
            del self.bound[key]
            if isinstance(error, Exception):  # otherwise the worker is stopping, and ends all gangs
                await compute.run(binding.leave_ranks)
            raise
        binding.move(pb.BINDING_STATE_IDLE)

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """The status of all bindings, sorted by job and policy."""
        found = self.parked | self.bound
        return [found[key].status() for key in sorted(found)]


log = structlog.get_logger("troupe.trainer")


class PolicySteps:
    """The newest step of each policy, running or ended, and the counters of steps."""

    def __init__(self, settings: TrainerSettings, compute: Compute, telemetry: Telemetry) -> None:
        self._settings = settings
        self._compute = compute
        self._runs: dict[Key, StepRun] = {}
        self._counting: set[asyncio.Task[None]] = set()
        self._store: Any = None
        labels = ["job_id", "policy"]
        self._tokens = telemetry.counter("troupe_trainer_tokens", "Tokens trained.", labels)
        self._busy = telemetry.counter("troupe_trainer_busy_seconds", "Computing.", labels)
        self._steps = telemetry.counter("troupe_trainer_steps", "Steps.", [*labels, "outcome"])

    def connect(self, store: Any) -> None:
        """Set the experience store's stub, for claims and commits."""
        self._store = store

    async def stop(self) -> None:
        """Cancel all steps and release their samples."""
        runs = list(self._runs.values())
        await asyncio.gather(*(run.cancel() for run in runs))
        leaving = [asyncio.create_task(run.settled()) for run in runs]
        if leaving:
            await asyncio.wait(leaving, timeout=self._settings.trainer_claim_wait_seconds + 1)
        for task in self._counting:
            task.cancel()
        await asyncio.gather(*self._counting, return_exceptions=True)

    def running(self, key: Key) -> StepRun | None:
        """The policy's running step, if there is one."""
        run = self._runs.get(key)
        return None if run is None or run.done else run

    def join(
        self, binding: PolicyBinding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        """Attach to the running step, or start a new one.

        Raises FailedPrecondition of kind "step_in_progress" if another step is running.
        """
        key = (binding.job_id, binding.policy)
        run = self.running(key)
        if run is None:
            return self._start(binding, step, version, oldest_version)
        if run.step != step:
            raise FailedPrecondition(
                f"policy {binding.policy} is in step {run.step}",
                kind="step_in_progress",
                field="step",
                value=step,
                remedy="Steps of one policy follow each other; wait, or bind it afresh.",
            )
        return run

    def go_on(self, binding: PolicyBinding, unfinished: SuspendedStep) -> None:
        """Continue a stopped step after its suspension failed."""
        binding.unfinished = unfinished
        self._start(binding, unfinished.step, unfinished.version, unfinished.oldest_version)

    async def give_back(self, binding: PolicyBinding, unfinished: SuspendedStep) -> None:
        """Release the samples of a stopped step whose gradients are lost."""
        await self._make_claims(binding, unfinished.step, unfinished).close()

    async def cancel(self, key: Key) -> None:
        """Cancel the policy's step, and forget it."""
        run = self._runs.pop(key, None)
        if run is not None and not run.done:
            await run.cancel()

    def forget(self, key: Key) -> None:
        """Forget the policy's step, which has ended."""
        self._runs.pop(key, None)

    def _start(
        self, binding: PolicyBinding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        unfinished, binding.unfinished = binding.unfinished, None
        if unfinished is not None and (unfinished.step, unfinished.version) != (step, version):
            unfinished = None  # a step of another version: `StepRun` discards its gradients

        make_claims = functools.partial(self._make_claims, binding, step)
        bounds = (step, version, oldest_version)
        run = StepRun(binding, *bounds, make_claims, self._compute, self._settings, unfinished)
        self._runs[(binding.job_id, binding.policy)] = run
        counting = asyncio.create_task(self._count(binding, run))
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)
        return run

    def _make_claims(
        self, binding: PolicyBinding, step: int, unfinished: SuspendedStep | None
    ) -> StepClaims:
        where = (binding.job_id, binding.policy, step, binding.claimant)
        return StepClaims(self._store, *where, self._settings.trainer_lease_seconds, unfinished)

    async def _count(self, binding: PolicyBinding, run: StepRun) -> None:
        """Wait for the step's commit and add it to the counters."""
        commit = await run.outcome()
        if commit is None:
            return
        labels = (binding.job_id, binding.policy)
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_").lower()
        self._steps.labels(*labels, outcome).inc()
        self._tokens.labels(*labels).inc(commit.metrics.get("tokens", 0.0))
        self._busy.labels(*labels).inc(commit.metrics.get("train/seconds", 0.0))


class Swaps:
    """Suspends, prefetches and resumes policies of this worker."""

    def __init__(
        self, bindings: Bindings, steps: PolicySteps, compute: Compute, telemetry: Telemetry
    ) -> None:
        self._bindings, self._steps, self._compute = bindings, steps, compute
        self._swap_clock = SwapClock(compute)
        self._seconds = telemetry.counter(
            "troupe_trainer_swap_seconds",
            "Seconds that devices were idle while policies were suspended and resumed.",
            ["job_id", "policy", "what"],
        )

    async def suspend(self, key: Key) -> trainer_pb2.SuspendedState:
        """Suspend a policy to free its device; repeated, it returns the same state.

        Raises NotFound of kind "not_bound", and as `PolicyBinding.suspend`: then the policy stays
        bound, unless the ranks of its gang have ended (Aborted of kind "gang_lost").
        """
        bindings = self._bindings
        async with bindings.lock(key):
            parked = bindings.parked.get(key)
            if key not in bindings.bound and parked is not None and parked.suspended is not None:
                return parked.suspended
            binding, run = bindings.find(key), self._steps.running(key)
            # Without a running step, an unfinished step of a resumed state is passed on unchanged.
            unfinished = binding.unfinished if run is None else await run.suspend()
            if binding.versions.dirty:
                await self._compute.run(binding.versions.reset)
            binding.move(pb.BINDING_STATE_SUSPENDING)
            try:
                # In parallel with the computation of a policy that was resumed already.
                with self._swap_clock.swapping() as seconds:
                    state = await asyncio.to_thread(binding.suspend, unfinished)
                    state.seconds = seconds()
            except TroupeError:
                binding.move(pb.BINDING_STATE_IDLE)
                if binding.learner.lost:
                    await self._give_up(binding, unfinished)
                elif unfinished is not None:  # the suspension failed, so the step continues
                    self._steps.go_on(binding, unfinished)
                raise
            self._steps.forget(key)
            bindings.parked[key] = bindings.bound.pop(key)
            binding.move(pb.BINDING_STATE_SUSPENDED)
            self._count(binding, "suspend", state.seconds)
            return state

    async def _give_up(self, binding: PolicyBinding, unfinished: SuspendedStep | None) -> None:
        """Unbind a policy whose ranks have ended: there is no state to suspend."""
        if unfinished is not None:
            await self._steps.give_back(binding, unfinished)
        self._steps.forget((binding.job_id, binding.policy))
        del self._bindings.bound[(binding.job_id, binding.policy)]
        binding.move(pb.BINDING_STATE_RELEASED)
        await self._compute.run(binding.release)

    async def resume(
        self,
        key: Key,
        spec: JobSpec,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> PolicyBinding:
        """Bind a policy where its suspension stopped. Raises as `PolicyBinding.resume`."""
        bindings = self._bindings
        # The measured time includes the wait for a running prefetch.
        with self._swap_clock.swapping() as seconds:
            async with bindings.lock(key):
                old = bindings.bound.get(key)
                if old is not None and old.resumed_from == state.key:
                    return old
                await self._steps.cancel(key)
                binding = bindings.shell(key, spec, spec_json)
                binding.move(pb.BINDING_STATE_BINDING)
                bindings.parked.pop(key, None)
                async with bindings.filling(key, binding, self._compute):
                    await self._compute.hold(binding.resume, state, version, checksum)
                self._count(binding, "resume", seconds())
                return binding

    async def prefetch(
        self, key: Key, spec: JobSpec, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        """Fetch a suspended state ahead of `resume`, which then reports any failure."""
        bindings = self._bindings
        async with bindings.lock(key):
            if key in bindings.bound:
                return
            binding = bindings.parked[key] = bindings.shell(key, spec, spec_json)
            if binding.state == pb.BINDING_STATE_BINDING:  # new
                binding.move(pb.BINDING_STATE_RELEASED)
            await asyncio.to_thread(binding.prefetch, state)

    def _count(self, binding: PolicyBinding, what: str, seconds: float) -> None:
        binding.swapped(seconds)
        self._seconds.labels(binding.job_id, binding.policy, what).inc(seconds)
        log.info(what, job_id=binding.job_id, policy=binding.policy, seconds=round(seconds, 4))


def spec_with(policy: str, spec_json: str) -> JobSpec:
    """Parse the specification and check that it has this policy.

    Raises InvalidArgument, of kind "invalid_spec" if it cannot be parsed.
    """
    try:
        spec = JobSpec.model_validate_json(spec_json)
    except ValidationError as error:
        remedy = "Send the validated specification (JobSpec.model_dump_json)."
        first = explained(error, JobSpec, remedy)[0]
        raise InvalidArgument(
            first.message,
            kind="invalid_spec",
            field="spec_json" if first.field == "job" else first.field,
            value=first.value or None,
            remedy=first.remedy,
        ) from error
    if policy not in spec.policies:
        raise InvalidArgument(
            f"the job has no policy '{policy}'",
            field="policy",
            value=policy,
            remedy=f"Known: {', '.join(sorted(spec.policies))}.",
        )
    return spec


T = TypeVar("T")
# Seconds that ranks may take to end, and then again to be killed.
_GANG_SECONDS = 8.0


class TrainerWorker:
    """The trainer service without gRPC: policies bound to one device, and their steps."""

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._device = choose_device(settings.trainer_device)
        self._devices = find_devices()
        self._compute = Compute(settings.threads, self._device)
        self._transfer = HostTransfer(settings, telemetry)
        self._remote = RemoteStates(self._transfer, settings)
        self._pool = ParameterPool(self._device)
        self._gangs = Gangs(settings)
        self.bindings = Bindings(self._new_binding)
        self._steps = PolicySteps(settings, self._compute, telemetry)
        self._members = FrozenVersions(self._transfer, settings.data_dir)
        self._swaps = Swaps(self.bindings, self._steps, self._compute, telemetry)
        self._usage = BusyFraction()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Open channels and import transformers in the background."""
        settings = self._settings
        store = connect(settings.experience_store_address, settings.client())
        await self._exit.enter_async_context(store)
        self._steps.connect(experience_store_pb2_grpc.ExperienceStoreStub(store))
        await self._transfer.start()
        self._spawn(self._compute.run(import_transformers))

    async def stop(self) -> None:
        """Cancel all steps, so that their samples are free at once, and end all ranks."""
        await self._steps.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_gangs()
        await self._transfer.stop()
        await self._exit.aclose()
        self._compute.close()

    async def _end_gangs(self) -> None:
        """End all ranks, by force after `_GANG_SECONDS`."""
        ended = asyncio.ensure_future(self._compute.run(self._gangs.close))
        await asyncio.wait({ended}, timeout=_GANG_SECONDS)
        if not ended.done():  # ranks are computing
            self._gangs.give_up()
            await asyncio.wait({ended}, timeout=_GANG_SECONDS)

    # RPCs.

    async def bind(
        self, job_id: str, policy: str, spec_json: str, version: int, checksum: str
    ) -> PolicyBinding:
        """Bind a policy at a version. Idempotent.

        A running step from that version continues, since the caller may have restarted. Any other
        step is cancelled.
        """
        spec = spec_with(policy, spec_json)
        # Loading continues after the caller's deadline: a repeated call finds the policy bound.
        return await self._detached(self._bind(job_id, policy, spec, spec_json, version, checksum))

    async def run_step(
        self, job_id: str, policy: str, step: int, version: int, oldest_version: int | None = None
    ) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Start the step, or attach to it if it is running; see `StepRun.watch`.

        Samples that began under a version older than `oldest_version` are not trained.
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
        """Write the checkpoint of `version` while training continues; returns its path and size."""
        binding = self.bindings.find((job_id, policy))
        return await asyncio.to_thread(binding.checkpoints.save, version)

    def checkpoint(self, job_id: str, policy: str, version: int) -> Path:
        """The directory that `save_checkpoint` wrote. Raises NotFound ("checkpoint_not_found")."""
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
        """Run `FrozenVersions.keep` while training continues."""
        binding = self.bindings.find((job_id, policy))
        return await asyncio.to_thread(self._members.keep, binding, version, checksum)

    async def publish_member(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> pb.WeightsRef:
        """Run `FrozenVersions.publish`."""
        where = (job_id, policy, version, checksum)
        return await asyncio.to_thread(self._members.publish, *where)

    async def drop_member(self, job_id: str, policy: str, version: int, *, files: bool) -> None:
        """Run `FrozenVersions.drop`."""
        where = (job_id, policy, version)
        await asyncio.to_thread(self._members.drop, *where, files=files)

    async def restart(self, job_id: str, policy: str, version: int, checksum: str) -> PolicyBinding:
        """Run `Versions.restart` to its end, even if the caller disconnects; no step may run."""
        return await self._detached(self._restart((job_id, policy), version, checksum))

    async def offer_state(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> trainer_pb2.OfferStateResponse:
        """Offer a committed state on this host's disk to a trainer of another host."""
        return await asyncio.to_thread(self._remote.offer, job_id, policy, version, checksum)

    async def keep_state(
        self, job_id: str, policy: str, version: int, offer: trainer_pb2.OfferStateResponse
    ) -> trainer_pb2.KeepStateResponse:
        """Keep a copy of a state that a trainer of another host offers."""
        return await asyncio.to_thread(self._remote.keep, job_id, policy, version, offer)

    async def suspend(self, job_id: str, policy: str) -> trainer_pb2.SuspendedState:
        """Run `Swaps.suspend` to its end, even if the caller disconnects."""
        return await self._detached(self._swaps.suspend((job_id, policy)))

    async def resume(
        self,
        job_id: str,
        policy: str,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb2.SuspendedState,
    ) -> PolicyBinding:
        """Run `Swaps.resume` to its end, even if the caller disconnects."""
        where = ((job_id, policy), spec_with(policy, spec_json), spec_json)
        return await self._detached(self._swaps.resume(*where, version, checksum, state))

    async def prefetch(
        self, job_id: str, policy: str, spec_json: str, state: trainer_pb2.SuspendedState
    ) -> None:
        """Run `Swaps.prefetch` to its end, even if the caller disconnects."""
        where = ((job_id, policy), spec_with(policy, spec_json), spec_json)
        await self._detached(self._swaps.prefetch(*where, state))

    async def release(self, job_id: str, policy: str) -> None:
        """Unbind a policy if it is bound to this worker; its committed state stays on disk."""
        await self._detached(self._release((job_id, policy)))

    async def delete_states(self, job_id: str) -> None:
        """Delete the tensors of a job from this host's transfer layer."""
        await asyncio.to_thread(self._transfer.clear, f"{job_id}/")

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """The status of all bindings, sorted by job and policy."""
        return self.bindings.statuses()

    def heartbeat(self) -> orchestrator_pb2.HeartbeatRequest:
        """Build the heartbeat that is sent to the orchestrator every second."""
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
            devices=given_devices(self._devices, self._holders()),
        )

    def _holders(self) -> dict[int, list[str]]:
        """The policies on each device, by its index: a gang is on as many as it has ranks, any
        other on the first."""
        found: dict[int, list[str]] = {}
        for (job_id, policy), binding in self.bindings.bound.items():
            ranks = binding.spec.policies[policy].trainer.gang
            for device in self._devices[:ranks]:
                found.setdefault(device.index, []).append(f"{job_id}/{policy}")
        return found

    async def _bind(
        self, job_id: str, policy: str, spec: JobSpec, spec_json: str, version: int, checksum: str
    ) -> PolicyBinding:
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
                await asyncio.to_thread(parked.release)
            binding = self._new_binding(key, spec, spec_json)
            async with bindings.filling(key, binding, self._compute):
                await self._compute.run(binding.load, version, checksum)
            # Checked, since deterministic results depend on the number of threads.
            threads = self._settings.threads
            log.info("bound", job_id=job_id, policy=policy, version=version, threads=threads)
            return binding

    def _new_binding(self, key: Key, spec: JobSpec, spec_json: str) -> PolicyBinding:
        return PolicyBinding(
            *key,
            spec,
            spec_json,
            self._settings,
            self._transfer,
            self._device,
            self._pool,
            self._remote.store(*key),
            self._gangs,
        )

    async def _restart(self, key: Key, version: int, checksum: str) -> PolicyBinding:
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
                await asyncio.to_thread(parked.release)
            if binding is not None:
                binding.move(pb.BINDING_STATE_RELEASED)
                await self._compute.run(binding.release)

    async def _detached(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _matches(binding: PolicyBinding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        _same(binding, spec_json, version, checksum)
        and not binding.versions.dirty
        and binding.state == pb.BINDING_STATE_IDLE
    )


def _same(binding: PolicyBinding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        binding.spec_json == spec_json
        and binding.version == version
        and (not checksum or binding.weights.checksum == checksum)
    )
