"""Gives tickets to rollout workers until every trajectory has ended."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, Final

import structlog

from services.orchestrator.batch import Batch, Flight
from services.orchestrator.context import JobContext
from services.orchestrator.early import EarlyStart
from services.orchestrator.engines import Engines
from services.orchestrator.faults import RENEWABLE, Attempts, Patience, job_fault
from services.orchestrator.parting import Parting
from services.orchestrator.redundancy import REDUNDANT
from services.orchestrator.victims import Victims
from services.orchestrator.workers import Worker
from troupe.rpc import TroupeError, Unavailable, new_id
from troupe.scheduling import admission, placement
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as ro

_log = structlog.get_logger(__name__)
_ENDED: Final = frozenset(
    {pb.TRAJECTORY_STATE_COMPLETED, pb.TRAJECTORY_STATE_FAILED, pb.TRAJECTORY_STATE_ABORTED}
)
# Another wave starts when a quarter of the window is free: a call per wave, not per trajectory.
_WAVE_FRACTION: Final = 0.25
# Groups that are taken in before the event loop does something else.
_AT_ONCE: Final = 256
# The store has ended what is aborted; telling who runs it only saves the work.
_ABORT_SECONDS: Final = 10.0
# Why a trajectory is aborted that the store ended before whoever runs it could tell.
_ENDED_BEFORE: Final = "ended_before"
Group = list[ro.Ticket]


class Dispatch:
    """All trajectories of a job, of however many batches, in one window.

    A stream that breaks, or a worker that is lost, costs nothing but time: what it had not ended
    goes to whoever is ready. Batches of older steps go first, those that run aside last.
    """

    def __init__(self, job: JobContext, engines: Engines) -> None:
        self._job = job
        self._engines = engines
        self._limit = job.spec.limits.max_concurrent_trajectories
        self._open: dict[str, Flight] = {}
        # Those of each query: one of thousands ends every few milliseconds.
        self._by_query: dict[str, set[str]] = {}
        # Groups that wait for a worker, oldest step first.
        self._waiting: list[Group] = []
        # Trajectories per worker that are dispatched and not ended.
        self._running: dict[Worker, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A worker that just failed, until its pause is over.
        self._resting: set[Worker] = set()
        self._attempts: dict[Worker, Attempts] = {}
        self._parting = Parting()
        self.early = EarlyStart(job, engines)
        # By trajectory: what kills its worker is run again only so often.
        self._victims: dict[str, Victims] = {}
        self._wake = asyncio.Event()
        self._turn = 0
        # Waits for this job's turn on workers that it shares deaths with others of.
        self._admission: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start what was added, until cancelled. Raises `TroupeError`: a fault of the job."""
        watch = asyncio.create_task(self._watch_engines())
        try:
            while True:
                self._start_wave()
                self._wake.clear()
                await self._wake.wait()
                self._reap()
                for victims in list(self._victims.values()):
                    victims.check()
        finally:
            self._job.shared.in_flight.pop(self._job.job_id, None)
            watch.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(watch, *self._tasks, self.early.closed(), return_exceptions=True)

    def add(self, batch: Batch, groups: Iterable[Group]) -> None:
        """Run these, too. The members of a group start together."""
        groups = list(groups)
        for group in groups:
            batch.add([ticket.trajectory_id for ticket in group])
            for ticket in group:
                self._open[ticket.trajectory_id] = Flight(batch, ticket)
                self._by_query.setdefault(ticket.query_id, set()).add(ticket.trajectory_id)
        last = self._waiting[-1] if self._waiting else None
        if groups and (
            last is None
            or (
                last[0].trajectory_id in self._open
                and self._turn_of(last) <= (batch.aside, batch.step)
            )
        ):  # behind all that wait: nothing has to be sorted
            self._waiting += groups
            self._wake.set()
        else:
            self._wait(groups)

    def withdraw(self, batch: Batch, query_ids: Collection[str], reason: str) -> set[str]:
        """The store has ended these queries: wait for them no longer, abort what runs of them.

        Returns the trajectories that run until they are aborted.
        """
        gone = self._of(batch, query_ids)
        for trajectory_id in gone:
            self._close(trajectory_id)
        batch.remove(gone)
        there = self._abort_running(gone, reason)
        if len(there) < len(gone):
            self._wait(())
        self._wake.set()
        return there

    def _complete(self, batch: Batch, query_id: str) -> None:
        """The store has all members of the query's group: the rest of it is redundant."""
        running = self.withdraw(batch, (query_id,), REDUNDANT)
        self._parting.add(batch, query_id, running, self._job.spec.pipeline.group_size)

    def end_untold(self, batch: Batch, ended: Collection[str]) -> None:
        """The store ended these long ago and whoever runs them does not say so: what is still
        waited for of them has ended, unseen. What is told of it later does not count."""
        untold = {one for one in ended if one in self._open and self._open[one].batch is batch}
        parting = self._parting.of(batch, ended)
        if not (gone := untold | parting):
            return
        _log.warning("nobody told how they ended", trajectory_ids=sorted(gone))
        self._abort_running(gone, _ENDED_BEFORE)
        for running in self._running.values():
            running -= gone
        for trajectory_id in untold:
            self._close(trajectory_id)
            batch.end_unseen(trajectory_id)
        self._parting.end_untold(parting)
        self._wait(())

    def move(self, source: Batch, query_ids: Collection[str], target: Batch) -> None:
        """These queries go on in another batch; what runs of them runs on."""
        moved = self._of(source, query_ids)
        for trajectory_id in moved:
            self._open[trajectory_id].batch = target
        target.add(moved)
        source.remove(moved)
        for query_id in query_ids:
            target.note_started(query_id, source.started.pop(query_id, {}))
        self._wait(())

    def describe(self, batch: Batch) -> str:
        """Where the trajectories of a batch are."""
        where = ", ".join(f"{len(ids)} on {worker}" for worker, ids in self._running.items() if ids)
        if not where:
            return f"waiting for a ready rollout worker for {batch.open} trajectories"
        return f"waiting for {batch.open} trajectories ({where})"

    def _of(self, batch: Batch, query_ids: Collection[str]) -> set[str]:
        return {
            trajectory_id
            for query_id in query_ids
            for trajectory_id in self._by_query.get(query_id, ())
            if self._open[trajectory_id].batch is batch
        }

    def _close(self, trajectory_id: str) -> None:
        if (victims := self._victims.pop(trajectory_id, None)) is not None:
            victims.clear()
        query_id = self._open.pop(trajectory_id).ticket.query_id
        left = self._by_query[query_id]
        left.discard(trajectory_id)
        if not left:
            del self._by_query[query_id]

    def _wait(self, more: Collection[Group]) -> None:
        """Put groups where they belong in the queue, and those that left out of it."""
        groups = [
            left
            for group in (*self._waiting, *more)
            if (left := [one for one in group if one.trajectory_id in self._open])
        ]
        # Stable: first come, first served within a step.
        groups.sort(key=self._turn_of)
        self._waiting = groups
        self._wake.set()

    def _turn_of(self, group: Group) -> tuple[bool, int]:
        batch = self._open[group[0].trajectory_id].batch
        return batch.aside, batch.step

    def _in_flight(self) -> int:
        """Trajectories dispatched and not ended; also told to whoever pictures the cluster."""
        count = sum(len(running) for running in self._running.values())
        self._job.shared.in_flight[self._job.job_id] = count
        return count

    def _start_wave(self) -> None:
        in_flight = self._in_flight()
        if not self._waiting:
            return
        deaths = self._job.shared.deaths
        if not deaths.may_begin(self._job.job_id):
            if self._admission is None or self._admission.done():
                self._admission = self._spawn(deaths.turn(self._job.job_id))
            return
        sizes = [len(group) for group in self._waiting]
        count = admission.next_wave(sizes, in_flight=in_flight, limit=self._limit)
        if count < len(sizes) and in_flight > (1 - _WAVE_FRACTION) * self._limit:
            return
        groups, self._waiting = self._waiting[:count], self._waiting[count:]
        by_batch: dict[Batch, list[Group]] = {}
        for group in groups:
            batch = self._open[group[0].trajectory_id].batch
            by_batch.setdefault(batch, []).append(group)
        left: list[Group] = []
        for batch, some in by_batch.items():
            left += self._start(batch, some)
        self._waiting = left + self._waiting
        self._in_flight()

    def _start(self, batch: Batch, groups: list[Group]) -> list[Group]:
        """Give a batch's groups to workers; returns them when there is none."""
        workers = {
            worker.worker_id: worker
            for worker in self._engines.ready(batch.floors)
            if worker not in self._resting
        }
        if not workers:
            return groups
        loads = [
            placement.RolloutWorker(worker_id, len(self._running.get(worker, ())))
            for worker_id, worker in workers.items()
        ]
        self._turn += 1
        chosen = placement.spread_queries([len(group) for group in groups], loads, turn=self._turn)
        tickets: dict[str, Group] = {}
        for worker_id, group in zip(chosen, groups, strict=True):
            began = self.early.worker_of(group[0].query_id, workers.values())
            tickets.setdefault(began.worker_id if began else worker_id, []).extend(group)
        for worker_id, together in tickets.items():
            worker = workers[worker_id]
            ids = {ticket.trajectory_id for ticket in together}
            self._running.setdefault(worker, set()).update(ids)
            self._spawn(self._follow(worker, batch, together))
        return []

    async def _follow(self, worker: Worker, batch: Batch, tickets: Group) -> None:
        """Run tickets on one worker to their end, or give back what is left of them."""
        request = ro.RunQueriesRequest(
            request_id=new_id("run"),
            job_id=self._job.job_id,
            step=batch.step,
            tickets=tickets,
            endings_only=True,
            together=True,
        )
        running = self._running[worker]
        # Not ended here yet. Whoever has may be asked for again, under the same id, before this
        # stream is over: that is another's.
        left = {ticket.trajectory_id for ticket in tickets}
        try:
            try:
                async with worker.while_alive():
                    stream = worker.rollout.RunQueries(request, timeout=batch.patience.left)
                    async for first in stream:
                        self._hear(worker, _split(first), left)
            finally:
                running -= left
                self._parting.end_untold(left)
            if lost := left & self._open.keys():
                raise Unavailable(f"{worker} ended its stream before {len(lost)} trajectories did")
        except TroupeError as error:
            await self._give_back(worker, left & self._open.keys(), error)

    def _hear(self, worker: Worker, events: list[ro.TrajectoryEvent], left: set[str]) -> None:
        """Take what a stream says; what ended is not `left` any more."""
        ended = {event.trajectory_id for event in events if self._take(event)}
        if not ended:
            return
        left -= ended
        if (running := self._running.get(worker)) is not None:
            running -= ended
        self._in_flight()
        if self._waiting:
            self._wake.set()
        if worker in self._attempts:
            self._attempts[worker].reset()

    def _take(self, event: ro.TrajectoryEvent) -> bool:
        """Whether the event ended a trajectory. Only its first ending counts."""
        if event.state in _ENDED and event.trajectory_id in self._parting:
            self._parting.end(event)
            return True
        flight = self._open.get(event.trajectory_id)
        if flight is not None:
            flight.batch.note_started(event.query_id, event.start_versions)
            if event.HasField("problem"):
                flight.batch.fail(job_fault(event.problem))
        if event.state not in _ENDED:
            return False
        if flight is not None:
            self._close(event.trajectory_id)
            flight.batch.end(event)
            if event.group_complete:
                self._complete(flight.batch, event.query_id)
        return True

    async def _give_back(self, worker: Worker, ids: Collection[str], error: TroupeError) -> None:
        over: set[str] = set()
        for batch in {self._open[one].batch for one in ids}:
            over.update(await batch.ended())
        # Its group may be complete without those of it that run elsewhere.
        self._abort_running(over.difference(ids), REDUNDANT)
        left: dict[str, Group] = {}
        for trajectory_id in sorted(ids):
            if (flight := self._open.get(trajectory_id)) is None:
                continue
            if trajectory_id in over:
                self._close(trajectory_id)
                flight.batch.end_unseen(trajectory_id)
                continue
            left.setdefault(flight.ticket.query_id, []).append(flight.ticket)
            self._note_victim(trajectory_id, worker)
        self._wait(left.values())
        if error.kind in RENEWABLE:
            self._engines.lost_job(worker)
        elif not worker.alive:
            self._running.pop(worker, None)
        count = sum(len(group) for group in left.values())
        lasting = Patience(f"work on {worker}", math.inf, "")
        attempts = self._attempts.setdefault(worker, Attempts(lasting))
        self._resting.add(worker)
        self._wake.set()
        try:
            if attempts.worth_a_notice:
                await self._job.warn(
                    f"{worker}: {error}. {count} trajectories are dispatched again."
                )
            if worker.alive:
                await attempts.failed(error)
        finally:
            self._resting.discard(worker)
            self._wake.set()

    def _note_victim(self, trajectory_id: str, worker: Worker) -> None:
        victims = self._victims.get(trajectory_id)
        if victims is None:
            victims = self._victims[trajectory_id] = Victims(
                self._job.shared.workers,
                self._job.shared.deaths,
                self._job.job_id,
                self._job.spec.limits.worker_deaths,
                f"ran {trajectory_id}",
                "workflow",
                "Look into the rollout workers' logs for what ended them: the workflow, a crash in "
                "a library of its, too little memory. Then resume the job.",
            )
        victims.note(worker)

    def _abort_running(self, trajectory_ids: Collection[str], reason: str) -> set[str]:
        """Abort those of them that run; which these are."""
        found: set[str] = set()
        for worker, running in self._running.items():
            if there := running.intersection(trajectory_ids):
                found |= there
                self._spawn(self._abort(worker, sorted(there), reason))
        return found

    async def _abort(self, worker: Worker, trajectory_ids: list[str], reason: str) -> None:
        request = ro.AbortTrajectoriesRequest(
            request_id=new_id("abort"),
            job_id=self._job.job_id,
            trajectory_ids=trajectory_ids,
            reason=reason,
        )
        try:
            async with worker.while_alive():
                await worker.rollout.AbortTrajectories(request, timeout=_ABORT_SECONDS)
        except TroupeError as error:
            _log.warning("trajectories not aborted", worker=str(worker), error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._wake.set())
        return task

    def _reap(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def _watch_engines(self) -> None:
        while True:
            await self._engines.change()
            self._wake.set()


async def add_in_parts(dispatch: Dispatch, batch: Batch, groups: Iterable[Group]) -> None:
    """Add these to `batch` a part at a time: heartbeats and users do not wait until a step of
    200,000 trajectories is planned."""
    parts = iter(groups)
    while some := list(itertools.islice(parts, _AT_ONCE)):
        dispatch.add(batch, some)
        await asyncio.sleep(0)


def _split(first: ro.TrajectoryEvent) -> list[ro.TrajectoryEvent]:
    """The events of a message, in their order. Those that came with the first leave it: who keeps
    it must not keep them all."""
    events = [first, *first.together]
    first.ClearField("together")
    return events
