"""A trainer worker: owns a device, to which policies are bound and from which they are released.

`Bindings` holds the worker's policies; `PolicySteps` runs their optimizer steps; `Swaps` suspends
and resumes them; `TrainerWorker` owns them all, and is what the servicer (server.py) calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from services.chassis.heartbeat import given_devices
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.binding import PolicyBinding
from services.trainer.claims import StepClaims
from services.trainer.compute import (
    BusyFraction,
    Compute,
    SwapClock,
    choose_device,
    give_back_memory,
    memory_of,
)
from services.trainer.frozen_versions import FrozenVersions
from services.trainer.gang.gang import ALONE, GangHosts, Gangs, ranks_here
from services.trainer.gang.lending import LentDevices
from services.trainer.learning.frozen_base import leave_unused_bases
from services.trainer.learning.model import import_transformers
from services.trainer.settings import TrainerSettings
from services.trainer.specifications import Specifications
from services.trainer.state.suspension import ParameterPool, SuspendedStep
from services.trainer.step import StepRun
from services.trainer.versions import RemoteStates
from services.trainer.weight_sender import WeightSender
from troupe.contracts import kinds, metric_names
from troupe.devices import find_devices
from troupe.job import JobSpec
from troupe.rpc import (
    Aborted,
    FailedPrecondition,
    NotFound,
    TroupeError,
    connect,
)
from troupe.rpc.addresses import split_address
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import trainer_pb2 as trainer_pb

log = structlog.get_logger("troupe.trainer")

# (job id, policy).
Key = tuple[str, str]
T = TypeVar("T")
# Seconds that ranks may take to end, and then again to be killed.
_GANG_SECONDS = 8.0
# Seconds that states may take to be written when the worker is stopped.
_FLUSH_SECONDS = 5.0
# Tokens for people to look at are not worth more.
_REPORT_SECONDS = 10.0


class Bindings:
    """Table of the policies bound to this worker, and of parked bindings without weights."""

    def __init__(self, make: Callable[[Key, JobSpec, str, GangHosts], PolicyBinding]) -> None:
        """`make`: makes the binding of a policy from its key, the specification, its JSON, and the
        hosts of its gang."""
        self.bound: dict[Key, PolicyBinding] = {}
        # Parked bindings (learners without weights) of suspended or prefetched policies.
        self.parked: dict[Key, PolicyBinding] = {}
        self._make = make
        self._locks: dict[Key, asyncio.Lock] = {}

    def lock(self, key: Key) -> asyncio.Lock:
        """Return the lock of one policy, held to bind, release, swap, or start a step."""
        return self._locks.setdefault(key, asyncio.Lock())

    def find(self, key: Key) -> PolicyBinding:
        """Return the binding of a policy that is loaded. Raises NotFound of kind "not_bound"."""
        binding = self.bound.get(key)
        if binding is None or binding.state == common_pb.BINDING_STATE_BINDING:
            raise NotFound(
                f"policy {key[1]} of job {key[0]} is not bound to this worker",
                kind=kinds.NOT_BOUND,
                field="policy",
                value=key[1],
                remedy="Bind it here, or ask the worker that it is bound to.",
            )
        return binding

    def find_trained(self, key: Key) -> PolicyBinding:
        """Like `find`. Raises FailedPrecondition of kind "policy_frozen" for a frozen policy."""
        binding = self.find(key)
        if not binding.trainable:
            raise FailedPrecondition(
                f"policy {key[1]} is frozen", kind="policy_frozen", field="policy", value=key[1]
            )
        return binding

    def shell(
        self, key: Key, spec: JobSpec, spec_json: str, hosts: GangHosts = ALONE
    ) -> PolicyBinding:
        """Return the parked binding of a policy, if its specification is the same; else a new
        binding."""
        parked = self.parked.get(key)
        if parked is not None and parked.spec_json == spec_json:
            return parked
        return self._make(key, spec, spec_json, hosts)

    @contextlib.asynccontextmanager
    async def filling(
        self, key: Key, binding: PolicyBinding, compute: Compute
    ) -> AsyncIterator[None]:
        """Bind the policy for a state that is loaded inside; unbind it if that fails.

        An earlier binding leaves its gang first, whose ranks know policies by key.
        """
        if (before := self.bound.pop(key, None)) is not None:
            await compute.run(before.leave)
        self.bound[key] = binding
        try:
            yield
        except BaseException as error:
            binding.move(common_pb.BINDING_STATE_RELEASED)
            del self.bound[key]
            if isinstance(error, Exception):  # otherwise the worker is stopping, and ends all gangs
                await compute.run(binding.leave_ranks)
            raise
        binding.move(common_pb.BINDING_STATE_IDLE)

    def statuses(self) -> list[trainer_pb.BindingStatus]:
        """Return the status of all bindings, sorted by job and policy."""
        found = self.parked | self.bound
        return [found[key].status() for key in sorted(found)]


class PolicySteps:
    """The newest step of each policy, running or ended, and the counters of steps."""

    def __init__(self, settings: TrainerSettings, compute: Compute, telemetry: Telemetry) -> None:
        self._settings = settings
        self._compute = compute
        self._runs: dict[Key, StepRun] = {}
        self._counting: set[asyncio.Task[None]] = set()
        # The experience store's stub, for claims and commits, and the orchestrator's, for reports;
        # set when the worker starts.
        self.store: Any = None
        self.orchestrator: Any = None
        labels = ["job_id", "policy"]
        self._tokens = telemetry.counter("troupe_trainer_tokens", "Tokens trained.", labels)
        self._busy = telemetry.counter("troupe_trainer_busy_seconds", "Computing.", labels)
        self._steps = telemetry.counter("troupe_trainer_steps", "Steps.", [*labels, "outcome"])

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
        """Return the policy's running step, if there is one."""
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
                kind=kinds.STEP_IN_PROGRESS,
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
        return StepClaims(self.store, *where, self._settings.trainer_lease_seconds, unfinished)

    async def _count(self, binding: PolicyBinding, run: StepRun) -> None:
        """Wait for the step's commit, add it to the counters, report tokens that are kept."""
        commit = await run.outcome()
        if commit is None:
            return
        labels = (binding.job_id, binding.policy)
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_").lower()
        self._steps.labels(*labels, outcome).inc()
        self._tokens.labels(*labels).inc(commit.metrics.get("tokens", 0.0))
        self._busy.labels(*labels).inc(commit.metrics.get(metric_names.TRAIN_SECONDS, 0.0))
        if not run.kept:
            return
        report = orchestrator_pb.ReportTrainedTokensRequest(
            job_id=binding.job_id, policy=binding.policy, step=run.step, turns=run.kept
        )
        try:
            await self.orchestrator.ReportTrainedTokens(report, timeout=_REPORT_SECONDS)
        except TroupeError as error:  # training does not depend on what people look at
            log.warning("tokens not reported", policy=binding.policy, error=str(error))


class Swaps:
    """Suspends, prefetches and resumes policies of this worker."""

    def __init__(
        self,
        specs: Specifications,
        bindings: Bindings,
        steps: PolicySteps,
        compute: Compute,
        telemetry: Telemetry,
    ) -> None:
        self._specs = specs
        self._bindings, self._steps, self._compute = bindings, steps, compute
        self._swap_clock = SwapClock(compute)
        self._seconds = telemetry.counter(
            "troupe_trainer_swap_seconds",
            "Seconds that devices were idle while policies were suspended and resumed.",
            ["job_id", "policy", "what"],
        )

    async def suspend(self, key: Key, *, free_device: bool = False) -> trainer_pb.SuspendedState:
        """Suspend a policy to free its device; repeated, it returns the same state.

        `free_device`: free all memory of the device that bound policies do not need, for other
        processes.
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
            binding.move(common_pb.BINDING_STATE_SUSPENDING)
            try:
                # In parallel with the computation of a policy that was resumed already.
                with self._swap_clock.swapping() as seconds:
                    state = await asyncio.to_thread(binding.suspend, unfinished)
                    if free_device:
                        await asyncio.to_thread(_free_device)
                    state.seconds = seconds()
            except TroupeError:
                binding.move(common_pb.BINDING_STATE_IDLE)
                if binding.learner.lost:
                    await self._give_up(binding, unfinished)
                elif unfinished is not None:  # the suspension failed, so the step continues
                    self._steps.go_on(binding, unfinished)
                raise
            self._steps.forget(key)
            bindings.parked[key] = bindings.bound.pop(key)
            binding.move(common_pb.BINDING_STATE_SUSPENDED)
            self._count(binding, "suspend", state.seconds)
            return state

    async def _give_up(self, binding: PolicyBinding, unfinished: SuspendedStep | None) -> None:
        """Unbind a policy whose ranks have ended: there is no state to suspend."""
        if unfinished is not None:
            await self._steps.give_back(binding, unfinished)
        self._steps.forget((binding.job_id, binding.policy))
        del self._bindings.bound[(binding.job_id, binding.policy)]
        binding.move(common_pb.BINDING_STATE_RELEASED)
        await self._compute.run(binding.release)

    async def resume(
        self,
        key: Key,
        spec_json: str,
        version: int,
        checksum: str,
        state: trainer_pb.SuspendedState,
        hosts: GangHosts,
    ) -> PolicyBinding:
        """Bind a policy where its suspension stopped. Raises as `PolicyBinding.resume`."""
        spec = await self._specs.parse(key[1], spec_json)
        bindings = self._bindings
        # The measured time includes the wait for a running prefetch.
        with self._swap_clock.swapping() as seconds:
            async with bindings.lock(key):
                old = bindings.bound.get(key)
                if old is not None and old.resumed_from == state.key:
                    return old
                await self._steps.cancel(key)
                binding = bindings.shell(key, spec, spec_json, hosts)
                binding.move(common_pb.BINDING_STATE_BINDING)
                bindings.parked.pop(key, None)
                async with bindings.filling(key, binding, self._compute):
                    await self._compute.hold(binding.move_to, hosts)
                    await self._compute.hold(binding.resume, state, version, checksum)
                self._count(binding, "resume", seconds())
                return binding

    async def prefetch(self, key: Key, spec_json: str, state: trainer_pb.SuspendedState) -> None:
        """Fetch a suspended state ahead of `resume`, which then reports any failure."""
        spec = await self._specs.parse(key[1], spec_json)
        bindings = self._bindings
        async with bindings.lock(key):
            if key in bindings.bound:
                return
            binding = bindings.parked[key] = bindings.shell(key, spec, spec_json)
            if binding.state == common_pb.BINDING_STATE_BINDING:  # new
                binding.move(common_pb.BINDING_STATE_RELEASED)
            await asyncio.to_thread(binding.prefetch, state)

    def _count(self, binding: PolicyBinding, what: str, seconds: float) -> None:
        binding.swapped(seconds)
        self._seconds.labels(binding.job_id, binding.policy, what).inc(seconds)
        log.info(what, job_id=binding.job_id, policy=binding.policy, seconds=round(seconds, 4))


def _free_device() -> None:
    """Free memory of the device that no bound policy needs, for other processes."""
    leave_unused_bases()
    give_back_memory()


class TrainerWorker:
    """The trainer service without gRPC: policies bound to one device, and their steps."""

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._device = choose_device(settings.trainer_device)
        self._devices = find_devices()
        self._compute = Compute(settings.threads, self._device)
        self.transfer = HostTransfer(settings, telemetry)
        self._specs = Specifications(settings)
        self.remote = RemoteStates(self.transfer, settings)
        self._pool = ParameterPool(self._device)
        self._gangs = Gangs(settings)
        self._ranks = ranks_here(settings)
        self.lent = LentDevices(settings, self._ranks)
        self.bindings = Bindings(self._new_binding)
        self.steps = PolicySteps(settings, self._compute, telemetry)
        self.members = FrozenVersions(self.transfer, settings.data_dir)
        self.swaps = Swaps(self._specs, self.bindings, self.steps, self._compute, telemetry)
        self.sender = WeightSender(self._compute, split_address(settings.address)[0])
        self._usage = BusyFraction()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Open channels and import transformers in the background."""
        settings = self._settings
        store = connect(settings.experience_store_address, settings.client())
        await self._exit.enter_async_context(store)
        self.steps.store = store_grpc.ExperienceStoreStub(store)
        orchestrator = connect(settings.orchestrator_address, settings.client())
        await self._exit.enter_async_context(orchestrator)
        self._specs.orchestrator = orchestrator_grpc.OrchestratorStub(orchestrator)
        self.steps.orchestrator = self._specs.orchestrator
        self._exit.callback(self._specs.close)
        await self.transfer.start()
        self._spawn(self._compute.run(import_transformers))

    async def stop(self) -> None:
        """Cancel all steps, so that their samples are free at once, and end all ranks."""
        await self.steps.stop()
        await self._flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._end_gangs(), self.lent.close())
        self.sender.close()
        await self.transfer.stop()
        await self._exit.aclose()
        self._compute.close()

    async def _flush(self) -> None:
        """Write states that are on no disk, for `_FLUSH_SECONDS`: where that is too short, their
        steps are computed again from their rows."""
        flushes = [b.versions.flush for b in self.bindings.bound.values() if b.versions.committed]
        if flushes:
            pending = [asyncio.ensure_future(self._compute.run(flush)) for flush in flushes]
            await asyncio.wait(pending, timeout=_FLUSH_SECONDS)

    async def make_durable(self, key: Key, version: int) -> None:
        """Have the state of `version` on disk, if it is the committed one. Raises as `save`."""
        binding = self.bindings.find(key)
        await self._compute.run(binding.versions.make_durable, version)

    async def _end_gangs(self) -> None:
        """End all ranks, by force after `_GANG_SECONDS`."""
        ended = asyncio.ensure_future(self._compute.run(self._gangs.close))
        await asyncio.wait({ended}, timeout=_GANG_SECONDS)
        if not ended.done():  # ranks are computing
            self._gangs.give_up()
            await asyncio.wait({ended}, timeout=_GANG_SECONDS)

    def heartbeat(self) -> orchestrator_pb.HeartbeatRequest:
        """Build the heartbeat that is sent to the orchestrator every second."""
        statuses = self.bindings.statuses()
        busy = [
            f"{status.job_id}/{status.policy}: "
            f"{common_pb.BindingState.Name(status.state)[14:].lower()} "
            f"step {status.step}, {status.samples} samples"
            for status in statuses
            if status.state not in (common_pb.BINDING_STATE_IDLE, common_pb.BINDING_STATE_SUSPENDED)
        ]
        lent = self.lent.request
        if lent is not None:
            busy.append(f"runs ranks of {lent.policy} for {lent.leader}")
        return orchestrator_pb.HeartbeatRequest(
            kind=orchestrator_pb.WORKER_KIND_TRAINER,
            bindings=statuses,
            doing="; ".join(busy) or ("idle" if self.bindings.bound else "unbound"),
            transfer_address=self.transfer.address,
            trainer=orchestrator_pb.TrainerDevice(
                slots=self._settings.trainer_slots,
                memory_bytes=memory_of(self._device, self._settings.trainer_memory_bytes),
                device=self._device.type,
                utilization=self._usage.fraction(self._compute.busy_seconds),
                ranks=self._ranks * self._settings.gang_nodes,
                # Hosts of a gang that a scheduler gave to this worker are its own.
                lends=self._settings.gang_nodes == 1,
                lends_to="" if lent is None else lent.leader,
                forward_tokens=self._settings.trainer_forward_tokens,
            ),
            devices=given_devices(self._devices, self._holders()),
        )

    def _holders(self) -> dict[int, list[str]]:
        """Return the policies on each device, by its index: a gang is on as many as it has ranks
        here, any other on the first."""
        found: dict[int, list[str]] = {}
        for (job_id, policy), binding in self.bindings.bound.items():
            ranks = binding.spec.policies[policy].trainer.ranks // (1 + len(binding.hosts.members))
            for device in self._devices[:ranks]:
                found.setdefault(device.index, []).append(f"{job_id}/{policy}")
        if (lent := self.lent.request) is not None:
            for device in self._devices[: lent.ranks]:
                found.setdefault(device.index, []).append(f"{lent.job_id}/{lent.policy}")
        return found

    async def bind(
        self,
        key: Key,
        spec_json: str,
        version: int,
        checksum: str,
        hosts: GangHosts = ALONE,
    ) -> PolicyBinding:
        """Bind a policy at a version; `hosts`: the other hosts of its gang. Idempotent.

        A running step from that version continues, since the caller may have restarted. Any other
        step is cancelled.
        """
        spec, bindings = await self._specs.parse(key[1], spec_json), self.bindings
        async with bindings.lock(key):
            old, run = bindings.bound.get(key), self.steps.running(key)
            if old is not None and old.hosts.members != hosts.members:
                old = None  # its ranks are on other hosts: binding again ends them
            busy = run is not None and run.version == version
            if busy and old is not None and _same(old, spec_json, version, checksum):
                if not old.versions.dirty:
                    await self._compute.run(old.versions.ensure_published)
                return old
            await self.steps.cancel(key)
            if (
                old is not None
                and _same(old, spec_json, version, checksum)
                and not old.versions.dirty
                and old.state == common_pb.BINDING_STATE_IDLE
            ):
                await self._compute.run(old.versions.ensure_published)
                return old
            if (parked := bindings.parked.pop(key, None)) is not None:
                await asyncio.to_thread(parked.release)
            binding = self._new_binding(key, spec, spec_json, hosts)
            async with bindings.filling(key, binding, self._compute):
                await self._compute.run(binding.load, version, checksum)
            # Checked, since deterministic results depend on the number of threads.
            threads = self._settings.threads
            log.info("bound", job_id=key[0], policy=key[1], version=version, threads=threads)
            return binding

    def _new_binding(
        self, key: Key, spec: JobSpec, spec_json: str, hosts: GangHosts
    ) -> PolicyBinding:
        return PolicyBinding(
            *key,
            spec,
            spec_json,
            self._settings,
            self.transfer,
            self._device,
            self._pool,
            self.remote.store(*key),
            self._gangs,
            hosts,
        )

    async def host_ranks(
        self, request: trainer_pb.HostRanksRequest
    ) -> AsyncIterator[trainer_pb.HostRanksEvent]:
        """Run ranks of a gang that another worker leads, as `LentDevices.host`.

        Raises Aborted of kind "devices_held" while policies are bound here.
        """
        # Bound here until its gang was formed again elsewhere.
        if (key := (request.job_id, request.policy)) in self.bindings.bound:
            await self.release(key)
        if self.bindings.bound:
            held = ", ".join(f"{policy} of {job_id}" for job_id, policy in self.bindings.bound)
            raise Aborted(
                f"this worker holds policies: {held}",
                kind="devices_held",
                remedy="Release or suspend them first: ranks for others get all of its devices.",
            )
        await asyncio.to_thread(_free_device)
        async for event in self.lent.host(request):
            yield event

    async def restart(self, key: Key, version: int, checksum: str) -> PolicyBinding:
        """Run `Versions.restart`; no step may run."""
        async with self.bindings.lock(key):
            binding = self.bindings.find_trained(key)
            if self.steps.running(key) is not None:
                raise FailedPrecondition(
                    f"policy {key[1]} is in the middle of a step",
                    kind=kinds.STEP_IN_PROGRESS,
                    field="policy",
                    value=key[1],
                    remedy="Begin again when its step is over.",
                )
            await self._compute.run(binding.versions.restart, version, checksum)
            return binding

    async def release(self, key: Key) -> None:
        """Unbind a policy if it is bound to this worker; its committed state stays on disk."""
        bindings = self.bindings
        async with bindings.lock(key):
            await self.steps.cancel(key)
            binding, parked = bindings.bound.pop(key, None), bindings.parked.pop(key, None)
            if parked is not None:
                await asyncio.to_thread(parked.release)
            if binding is not None:
                binding.move(common_pb.BINDING_STATE_RELEASED)
                await self._compute.run(binding.release)
            del binding, parked
            await asyncio.to_thread(give_back_memory)

    async def detached(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, even if the caller disconnects."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _same(binding: PolicyBinding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        binding.spec_json == spec_json
        and binding.versions.committed == version
        and (not checksum or binding.versions.weights.checksum == checksum)
    )
