"""The binder: gives trainer workers to the policies of all jobs, as `troupe.scheduling.binding`
decides. Nothing is polled: whoever has news touches it, and it sleeps until the plan says so."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol

import structlog

from services.orchestrator.workers import AWAY, Worker, WorkerRegistry
from troupe.rpc import FailedPrecondition, TroupeError
from troupe.scheduling import binding
from troupe.v1 import orchestrator_pb2 as orch

_log = structlog.get_logger(__name__)
# A worker that did not answer is asked again after so long.
_AGAIN_SECONDS: Final = 2.0


class Seated(Protocol):
    """A policy as the binder sees it (`training.PolicyTrainer`)."""

    @property
    def name(self) -> str:
        """Unique over all jobs: `{job}/{policy}`."""

    @property
    def worker(self) -> Worker | None:
        """Who holds it, or is about to."""

    def picture(self, now: float) -> binding.Policy:
        """What it needs; where it is, the binder knows."""

    def home(self) -> Worker | None:
        """Who suspended it, if its state waits in the transfer layer."""

    def seat(self, worker: Worker) -> None:
        """It may bind there."""

    def refuse(self, error: FailedPrecondition) -> None:
        """It can be bound nowhere."""

    def leave(self) -> None:
        """Suspend it."""

    def expect(self, worker: Worker) -> None:
        """Have its state ready there."""

    def retire(self) -> None:
        """It has been idle for long: release it."""


class Binder:
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
        self, policy: Seated, worker: Worker, release: Callable[[], Awaitable[object]]
    ) -> None:
        """Go on to `release` a policy at a worker that did not answer: others wait for its place.
        Until it is done, or the policy, or its successor, is bound there anew."""
        task = asyncio.create_task(self._evict(policy, worker, release))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _evict(
        self, policy: Seated, worker: Worker, release: Callable[[], Awaitable[object]]
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
        plan = binding.decide(binding.Rules(), [*policies, *others], workers, now)
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

    def _policy(self, one: Seated, usable: dict[str, Worker], now: float) -> binding.Policy:
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

    def _foreign(self, usable: dict[str, Worker]) -> list[binding.Policy]:
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


def _offer(worker: Worker) -> binding.Worker:
    device = worker.beat.trainer
    return binding.Worker(
        worker.worker_id, device.slots, device.memory_bytes, device.device or "cpu"
    )


def _same_host(one: Worker, other: Worker) -> bool:
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
