"""The binder: gives trainer workers to the policies of all jobs, as `troupe.scheduling.binding`
decides. Nothing is polled: whoever has news touches it, and it sleeps until the plan says so."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from services.orchestrator.errors import Deadline, RetryBackoff
from services.orchestrator.placement.workers import AWAY, WorkerHandle, WorkerRegistry
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable
from troupe.scheduling import binding
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch

if TYPE_CHECKING:
    from troupe.v1 import experience_store_pb2 as es
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub


def ready_work(
    status: es.TableStatus | None, policy: str, micro_batch: int, accumulated: int
) -> int:
    """Micro-batches of `policy` that could be computed in the step of `status`; the optimizer step
    counts as one once no sample can come any more.

    `accumulated` samples are in the gradients already, all of which are claimed. Without a status
    (nothing was pushed yet) there is no work.
    """
    counts = None
    if status is not None:
        counts = next((one for one in status.counts if one.policy == policy), None)
    if status is None or counts is None:
        return 0
    # Claimed and not in the gradients: leased, and about to be computed.
    left = counts.ready + max(0, counts.claimed - accumulated)
    if status.sealed and counts.pending == 0:
        return math.ceil(left / micro_batch) + 1
    return left // micro_batch


class ReadyOrder:
    """When each micro-batch that waits became ready; they are computed in that order."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def note(self, ready: int, now: float) -> None:
        """So many wait now."""
        while len(self._times) > ready:
            self._times.popleft()
        while len(self._times) < ready:
            self._times.append(now)

    @property
    def oldest(self) -> float | None:
        """When the oldest became ready; None when none waits."""
        return self._times[0] if self._times else None


# Steps that are open at once, and some.
_KEPT: Final = 64


class TableWatch:
    """Follows the tables of one job for as long as it runs; a store that is away is waited for."""

    def __init__(
        self,
        experience: ExperienceStoreAsyncStub,
        job_id: str,
        on_status: Callable[[], None] = lambda: None,
    ) -> None:
        self._experience = experience
        self._on_status = on_status
        # By step: what was pushed last; of the newest steps only.
        self._latest: dict[int, es.TableStatus] = {}
        self._job_id = job_id
        self._changed = asyncio.Event()
        # Whether nobody tells: then `latest` knows nothing.
        self.blind = True
        # Whether the store holds more than its high-water mark.
        self.over_high_water = False

    async def change(self, at_most: float) -> None:
        """Return when something may have changed: pushed, or so many seconds have passed."""
        try:
            async with asyncio.timeout(at_most):
                await self._changed.wait()
        except TimeoutError:
            return

    def latest(self, step: int) -> es.TableStatus | None:
        """What the store said last of a step."""
        return self._latest.get(step)

    async def run(self) -> None:
        """Follow, until cancelled."""
        attempts = RetryBackoff(Deadline("watching tables", math.inf, ""))
        request = es.WatchTablesRequest(job_id=self._job_id)
        while True:
            try:
                async for status in self._experience.WatchTables(request):
                    attempts.reset()
                    self.over_high_water = status.over_high_water
                    self.blind = False
                    self._latest[status.step] = status
                    self._latest = {
                        step: self._latest[step] for step in sorted(self._latest)[-_KEPT:]
                    }
                    self._on_status()
                    self.touch()
                error: TroupeError = Unavailable("the store ended the stream")
            except TroupeError as broken:
                # Whatever it is, the job does not depend on it: it looks by itself, too.
                error = Unavailable(str(broken))
            self.blind = True
            self._latest.clear()
            self._on_status()
            await attempts.failed(error)

    def touch(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()


_log = structlog.get_logger(__name__)
# A worker that did not answer is asked again after so long.
_AGAIN_SECONDS: Final = 2.0


class Seated(Protocol):
    """A policy as the binder sees it (`training.PolicyTrainer`)."""

    @property
    def name(self) -> str:
        """Unique over all jobs: `{job}/{policy}`."""

    @property
    def worker(self) -> WorkerHandle | None:
        """Who holds it, or is about to."""

    def picture(self, now: float) -> binding.Policy:
        """What it needs; where it is, the binder knows."""

    def home(self) -> WorkerHandle | None:
        """Who suspended it, if its state waits in the transfer layer."""

    def seat(self, worker: WorkerHandle) -> None:
        """It may bind there."""

    def refuse(self, error: FailedPrecondition) -> None:
        """It can be bound nowhere."""

    def leave(self) -> None:
        """Suspend it."""

    def expect(self, worker: WorkerHandle) -> None:
        """Have its state ready there."""

    def retire(self) -> None:
        """It has been idle for long: release it."""


class TrainerScheduler:
    """Policies and workers, and one loop that brings them together."""

    def __init__(
        self, workers: WorkerRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._seated: dict[str, Seated] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._planned = 0
        self._evictions: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to decide."""
        self._task = asyncio.create_task(self._run(), name="binder")

    async def close(self) -> None:
        """Decide no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for task in self._evictions:
            task.cancel()
        await asyncio.gather(*self._evictions, return_exceptions=True)

    @property
    def wanted(self) -> int:
        """Trainers that would be of use: to policies, or to a job that cannot begin without one."""
        return max(self._planned, int(self._workers.awaited(orch.WORKER_KIND_TRAINER)))

    def add(self, policy: Seated) -> None:
        """Look after a policy; it takes the place of an earlier one of its name."""
        self._seated[policy.name] = policy
        self.touch()

    def remove(self, policy: Seated) -> None:
        """Its job has ended."""
        if self._seated.get(policy.name) is policy:
            del self._seated[policy.name]
        self.touch()

    def evict(
        self, policy: Seated, worker: WorkerHandle, release: Callable[[], Awaitable[object]]
    ) -> None:
        """Go on to `release` a policy at a worker that did not answer: others wait for its place.
        Until it is done, or the policy, or its successor, is bound there anew."""
        task = asyncio.create_task(self._evict(policy, worker, release))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _evict(
        self, policy: Seated, worker: WorkerHandle, release: Callable[[], Awaitable[object]]
    ) -> None:
        while worker.alive:
            await asyncio.sleep(_AGAIN_SECONDS)
            now = self._seated.get(policy.name, policy)
            if now is not policy or now.worker is worker:
                return
            try:
                await release()
                return
            except TroupeError as error:
                _log.warning("not released", policy=policy.name, error=str(error))

    def touch(self) -> None:
        """Something has changed: decide anew."""
        self._news.set()

    async def _run(self) -> None:
        while True:
            again = math.inf
            try:
                again = self._decide()
            except Exception:
                # A fault of ours must not take the cluster's trainers along: the next news, or a
                # second, brings another chance.
                _log.exception("no plan could be made")
                again = self._clock() + 1.0
            await self._wait(again)

    async def _wait(self, until: float) -> None:
        """For news, of workers too, or for the time that the plan named."""
        news = asyncio.ensure_future(self._news.wait())
        workers = asyncio.ensure_future(self._workers.change())
        left = None if until == math.inf else max(0.0, until - self._clock())
        try:
            await asyncio.wait({news, workers}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (news, workers):
                waiting.cancel()
            await asyncio.gather(news, workers, return_exceptions=True)
        self._news.clear()

    def _decide(self) -> float:
        now = self._clock()
        usable = {w.worker_id: w for w in self._workers.usable(orch.WORKER_KIND_TRAINER)}
        workers = [_offer(worker) for worker in usable.values()]
        policies = [self._policy(one, usable, now) for one in self._seated.values()]
        for policy in policies:
            if problem := binding.too_large(policy, workers):
                self._seated[policy.policy].refuse(_too_large(problem, policy))
        others = self._foreign(usable)
        plan = binding.decide(binding.BindingRules(), [*policies, *others], workers, now)
        self._planned = plan.wanted
        for move in plan.moves:
            one = self._seated[move.policy]
            match move:
                case binding.Bind():
                    one.seat(usable[move.workers[0]])
                case binding.Suspend():
                    one.leave()
                case binding.Prefetch():
                    one.expect(usable[move.workers[0]])
                case binding.Release():
                    one.retire()
        return plan.again

    def _policy(self, one: Seated, usable: dict[str, WorkerHandle], now: float) -> binding.Policy:
        picture, held, home = one.picture(now), one.worker, one.home()
        if held is not None and held.alive:
            return replace(picture, bound=(held.worker_id,))
        near = set()
        for worker in usable.values():
            if home is not None and _same_host(home, worker):
                near.add(worker.worker_id)
            for status in worker.beat.bindings:
                # What an earlier orchestrator bound is as good as what this one did.
                if f"{status.job_id}/{status.policy}" == one.name and home is None:
                    near.add(worker.worker_id)
        ready = {w for w in picture.prefetched if w in usable}
        return replace(picture, near=frozenset(near), prefetched=frozenset(ready))

    def _foreign(self, usable: dict[str, WorkerHandle]) -> list[binding.Policy]:
        """What workers hold of jobs that nobody looks after (any more)."""
        found = {}
        for worker in usable.values():
            for status in worker.beat.bindings:
                name = f"{status.job_id}/{status.policy}"
                if name not in self._seated and status.state not in AWAY:
                    found[f"{name}@{worker.worker_id}"] = (worker.worker_id, status)
        return [
            binding.Policy(
                name, wanted=False, bound=(worker_id,), busy=True, size=status.state_bytes
            )
            for name, (worker_id, status) in found.items()
        ]


def _offer(worker: WorkerHandle) -> binding.RankWorker:
    device = worker.beat.trainer
    return binding.RankWorker(
        worker.worker_id, device.slots, device.memory_bytes, device.device or "cpu"
    )


def _same_host(one: WorkerHandle, other: WorkerHandle) -> bool:
    return one is other or (bool(one.beat.host_id) and one.beat.host_id == other.beat.host_id)


def _too_large(problem: binding.TooLarge, policy: binding.Policy) -> FailedPrecondition:
    name = policy.policy.partition("/")[2]
    return FailedPrecondition(
        f"policy {name} needs {problem.needed:,} bytes for its training state on each device of "
        f"its gang; the largest trainer has {problem.largest:,}",
        kind="policy_too_large",
        field=f"policies.{name}.model",
        value=problem.needed,
        remedy="Use a smaller model, an adapter (`lora`), or a larger gang (`trainer.gang`); or "
        "add a trainer with more memory (TROUPE_TRAINER_MEMORY_BYTES says how much it may use).",
    )
