"""Assignment of trainer workers to the policies of all jobs, as `troupe.scheduling.binding`
decides.

`TrainerScheduler` decides when `touch` reports a change, when a worker joins or leaves, and at the
time set by its last plan. `TableWatch` follows a job's tables, which show how much work is ready.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from services.orchestrator.errors import Deadline, RetryBackoff, cancel_all
from services.orchestrator.placement.leased_workers import LeasedWorkers
from services.orchestrator.placement.suspension import PolicySuspension
from services.orchestrator.placement.workers import AWAY, WorkerHandle, WorkerRegistry
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable
from troupe.scheduling import binding
from troupe.scheduling.memory import TOO_LARGE_REMEDY
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub

_log = structlog.get_logger(__name__)
# Pause before a worker that did not answer is asked again.
_AGAIN_SECONDS: Final = 2.0
# Newest steps whose table status is kept: more than are ever open at once.
_KEPT_STEPS: Final = 64
# Ranks of a worker that does not report its maximum: any gang may be requested of it.
_MOST_RANKS: Final = 1 << 12


class PolicyLease(Protocol):
    """The lease of one policy, as the scheduler gives and takes it."""

    name: str
    workers: LeasedWorkers
    suspension: PolicySuspension

    def scheduling_view(self, now: float) -> binding.Policy:
        """Return the policy for `binding.decide`; the scheduler adds where it is."""
        ...

    def suspend(self) -> None:
        """Have the policy suspended, so that another one may have its worker."""
        ...

    def prefetch(self, worker: WorkerHandle) -> None:
        """Have the suspended state fetched to `worker`, where the policy will be bound next."""
        ...

    def release_idle(self) -> None:
        """Release the policy, which has been idle for long."""
        ...


class TrainerScheduler:
    """One loop that assigns trainer workers to policies, suspends and releases them."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers
        self._leases: dict[str, PolicyLease] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._planned = 0
        self._evictions: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.create_task(self._run(), name="trainer-scheduler")

    async def close(self) -> None:
        """Stop the loop."""
        if self._task is not None:
            await cancel_all([self._task])
        await cancel_all(self._evictions)

    @property
    def wanted(self) -> int:
        """Trainer workers that policies, or a job that waits for its first one, could use now."""
        return max(self._planned, int(self._workers.awaited(orchestrator_pb.WORKER_KIND_TRAINER)))

    def add(self, policy: PolicyLease) -> None:
        """Schedule a policy from now on, in place of an earlier one of the same name."""
        self._leases[policy.name] = policy
        self.touch()

    def remove(self, policy: PolicyLease) -> None:
        """Stop scheduling a policy."""
        if self._leases.get(policy.name) is policy:
            del self._leases[policy.name]
        self.touch()

    def evict(
        self, policy: PolicyLease, worker: WorkerHandle, release: Callable[[], Awaitable[object]]
    ) -> None:
        """Repeat `release` at a worker that did not answer, since others wait for its device.

        Until it succeeds, or the policy or its successor is assigned there again.
        """
        task = asyncio.create_task(self._evict(policy, worker, release))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _evict(
        self, policy: PolicyLease, worker: WorkerHandle, release: Callable[[], Awaitable[object]]
    ) -> None:
        while worker.alive:
            await asyncio.sleep(_AGAIN_SECONDS)
            now = self._leases.get(policy.name, policy)
            if now is not policy or now.workers.leader is worker:
                return
            try:
                await release()
                return
            except TroupeError as error:
                _log.warning("not released", policy=policy.name, error=str(error))

    def touch(self) -> None:
        """Have the loop decide again, since something has changed."""
        self._news.set()

    async def _run(self) -> None:
        while True:
            again = math.inf
            try:
                again = self._decide()
            except Exception:
                # A bug here must not stop all training: it decides again at the next change, or
                # after a second.
                _log.exception("no plan could be made")
                again = time.monotonic() + 1.0
            await self._wait(again)

    async def _wait(self, until: float) -> None:
        """Wait for a change, of workers too, or until the time that the plan named."""
        news = asyncio.ensure_future(self._news.wait())
        workers = asyncio.ensure_future(self._workers.change())
        left = None if until == math.inf else max(0.0, until - time.monotonic())
        try:
            await asyncio.wait({news, workers}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all((news, workers))
        self._news.clear()

    def _decide(self) -> float:
        now = time.monotonic()
        expected = self._workers.expected(orchestrator_pb.WORKER_KIND_TRAINER)
        usable = {worker.worker_id: worker for worker in expected if worker.usable}
        workers = [_rank_worker(worker) for worker in usable.values()]
        perhaps = [_rank_worker(worker) for worker in expected]
        policies = [self._policy(one, usable, now) for one in self._leases.values()]
        again = math.inf
        for policy in policies:
            leased = self._leases[policy.policy].workers
            if problem := binding.too_large(policy, perhaps):
                leased.refuse(_too_large(problem, policy))
            leased.check_room()
            few = None if policy.bound else binding.too_many_ranks(policy, workers)
            again = min(again, leased.fall_short(few, now))
        others = self._foreign(usable)
        plan = binding.decide(binding.BindingRules(), [*policies, *others], workers, now)
        self._planned = plan.wanted
        for move in plan.moves:
            one = self._leases[move.policy]
            match move:
                case binding.Bind():
                    one.workers.assign(*(usable[worker_id] for worker_id in move.workers))
                case binding.Suspend():
                    one.suspend()
                case binding.Prefetch():
                    one.prefetch(usable[move.workers[0]])
                case binding.Release():
                    one.release_idle()
        return min(again, plan.again)

    def _policy(
        self, one: PolicyLease, usable: dict[str, WorkerHandle], now: float
    ) -> binding.Policy:
        view, held, home = one.scheduling_view(now), one.workers.leader, one.suspension.home
        if held is not None and held.alive:
            return replace(view, bound=tuple(worker.worker_id for worker in one.workers.group))
        near = set()
        for worker in usable.values():
            if home is not None and _same_host(home, worker):
                near.add(worker.worker_id)
            for status in worker.beat.bindings:
                # An earlier orchestrator may have bound it there.
                if f"{status.job_id}/{status.policy}" == one.name and home is None:
                    near.add(worker.worker_id)
        there = [_rank_worker(worker) for worker in usable.values()]
        if view.ranks > 1 and binding.too_many_ranks(view, there):
            # A gang may need the worker that it has failed on.
            view = replace(view, barred=view.barred - {one.workers.avoided})
        ready = {w for w in view.prefetched if w in usable}
        return replace(view, near=frozenset(near), prefetched=frozenset(ready))

    def _foreign(self, usable: dict[str, WorkerHandle]) -> list[binding.Policy]:
        """Return the workers' bindings without a lease in this process."""
        found = {}
        for worker in usable.values():
            for status in worker.beat.bindings:
                name = f"{status.job_id}/{status.policy}"
                if name not in self._leases and status.state not in AWAY:
                    lent = [w for w, one in usable.items() if _lends_to(one) == worker.worker_id]
                    found[f"{name}@{worker.worker_id}"] = ((worker.worker_id, *lent), status)
        return [
            binding.Policy(name, wanted=False, bound=group, busy=True, size=status.state_bytes)
            for name, (group, status) in found.items()
        ]


def _rank_worker(worker: WorkerHandle) -> binding.RankWorker:
    device = worker.beat.trainer
    return binding.RankWorker(
        worker.worker_id,
        device.slots,
        device.memory_bytes,
        device.device or "cpu",
        devices=device.ranks or _MOST_RANKS,
        host=worker.beat.host_id,
        lends=device.lends,
    )


def _lends_to(worker: WorkerHandle) -> str:
    """Return the leader of the gang that the worker runs ranks of, if any."""
    return worker.beat.trainer.lends_to


def _same_host(one: WorkerHandle, other: WorkerHandle) -> bool:
    return one is other or (bool(one.beat.host_id) and one.beat.host_id == other.beat.host_id)


def _too_large(problem: binding.TooLarge, policy: binding.Policy) -> FailedPrecondition:
    name = policy.policy.partition("/")[2]
    return FailedPrecondition(
        f"policy {name} needs {problem.needed:,} bytes on each training device; devices of the "
        f"largest trainer have {problem.largest:,}",
        kind=kinds.POLICY_TOO_LARGE,
        field=f"policies.{name}.model",
        value=problem.needed,
        remedy=TOO_LARGE_REMEDY,
    )


def ready_work(
    status: store_pb.TableStatus | None, policy: str, micro_batch: int, accumulated: int
) -> int:
    """Return the micro-batches of `policy` that could be computed now in the step of `status`.

    The optimizer step counts as one more once no sample can come. `accumulated` claimed samples are
    in the gradients already. Without a status (nothing was pushed yet) there is no work, nor while
    joint pairs wait for the other policies, which may need the device for theirs.
    """
    counts = None
    if status is not None:
        counts = next((one for one in status.counts if one.policy == policy), None)
    if status is None or counts is None:
        return 0
    if counts.pair_sums and not all(one.pair_sums for one in status.counts):
        return 0
    # Samples that are claimed and not in the gradients are about to be computed.
    left = counts.ready + max(0, counts.claimed - accumulated)
    final = status.sealed and counts.pending == 0
    return binding.ready_micro_batches(left, micro_batch, final=final)


class TableWatch:
    """A follower of one job's table status, which the experience store pushes.

    Waits for an unreachable store. Callers also poll occasionally, so nothing depends on this.
    """

    def __init__(
        self, experience: ExperienceStoreAsyncStub, job_id: str, on_status: Callable[[], None]
    ) -> None:
        self._experience = experience
        self._on_status = on_status
        # By step: the status that was pushed last, of the newest steps.
        self._latest: dict[int, store_pb.TableStatus] = {}
        self._job_id = job_id
        self._changed = asyncio.Event()
        # Whether the stream is broken: then `latest` is empty.
        self.blind = True
        # Whether the store holds more than its high-water mark.
        self.over_high_water = False

    async def change(self, at_most: float) -> None:
        """Wait until something has changed, at most `at_most` seconds."""
        try:
            async with asyncio.timeout(at_most):
                await self._changed.wait()
        except TimeoutError:
            return

    def latest(self, step: int) -> store_pb.TableStatus | None:
        """Return the newest status of a step."""
        return self._latest.get(step)

    async def run(self) -> None:
        """Follow the tables until cancelled."""
        attempts = RetryBackoff(Deadline("watching tables", math.inf, ""))
        request = store_pb.WatchTablesRequest(job_id=self._job_id)
        while True:
            try:
                async for status in self._experience.WatchTables(request):
                    attempts.reset()
                    self.over_high_water = status.over_high_water
                    self.blind = False
                    self._latest[status.step] = status
                    self._latest = {
                        step: self._latest[step] for step in sorted(self._latest)[-_KEPT_STEPS:]
                    }
                    self._on_status()
                    self.touch()
                error: TroupeError = Unavailable("the store ended the stream")
            except TroupeError as broken:
                # Any error is transient here, since the job also polls the store.
                error = Unavailable(str(broken))
            self.blind = True
            self._latest.clear()
            self._on_status()
            await attempts.failed(error)

    def touch(self) -> None:
        """Wake the callers of `change`, since something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()
