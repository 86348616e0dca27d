"""Dispatch of trajectories to rollout workers, repeated elsewhere when a worker is lost.

A *ticket* is one trajectory to run, a *group* all tickets of one query, and a `TicketBatch` all
trajectories that one step, evaluation or round of matches waits for. One `Dispatch` per job runs
all of its batches.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.errors import RENEWABLE, Deadline, RetryBackoff, cancel_all
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.rpc import TroupeError, Unavailable, new_id
from troupe.scheduling import admission
from troupe.scheduling.sharing import CapacityShares
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

Group = list[rollout_pb.Ticket]
_log = structlog.get_logger(__name__)
_ENDED: Final = frozenset(
    {
        common_pb.TRAJECTORY_STATE_COMPLETED,
        common_pb.TRAJECTORY_STATE_FAILED,
        common_pb.TRAJECTORY_STATE_ABORTED,
    }
)
# Groups that `add_in_parts` adds before it yields to the event loop.
_PART_GROUPS: Final = 256
# An aborted trajectory has already ended in the store; aborting it at the worker only saves work.
_ABORT_SECONDS: Final = 10.0
# Reason for aborting a trajectory that the store ended before the worker reported it.
_ENDED_BEFORE: Final = "ended_before"


class Dispatch:
    """The dispatcher of a job's trajectories, at most `limits.max_concurrent_trajectories` at a
    time.

    A broken stream or a lost worker costs only time: unfinished trajectories move to another
    worker. Batches of older steps go first, low-priority batches last.
    """

    def __init__(self, job: JobContext, engines: Engines) -> None:
        self._job = job
        self._engines = engines
        self._limit = job.spec.limits.max_concurrent_trajectories
        self._open: dict[str, OpenTicket] = {}
        # Open trajectories by query, for fast removal: one of thousands ends every few
        # milliseconds.
        self._by_query: dict[str, set[str]] = {}
        # Groups that wait for a worker, oldest step first.
        self._waiting: list[Group] = []
        self._shares = CapacityShares()
        # Trajectories in flight per worker.
        self._running: dict[WorkerHandle, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Workers that failed recently, until their pause is over.
        self._backing_off: set[WorkerHandle] = set()
        self._attempts: dict[WorkerHandle, RetryBackoff] = {}
        # Redundant trajectories that were withdrawn while running and not yet reported, with their
        # batch and query. Their reports still count: their progress is a metric, and some may be
        # members of their group.
        self._draining: dict[str, tuple[TicketBatch, str]] = {}
        self.early = EarlyStart(job, engines)
        # Guards by trajectory: one that kills its worker runs again only `limits.worker_deaths`
        # times.
        self._crash_guards: dict[str, CrashLoopGuard] = {}
        self._wake = asyncio.Event()
        self._turn = 0
        # Task that waits for this job's turn when jobs share dead workers (`SharedDeaths`).
        self._admission: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run added trajectories until cancelled. Raises `TroupeError` for a fault of the job."""
        watch = asyncio.create_task(self._watch_engines())
        try:
            while True:
                self._start_wave()
                self._wake.clear()
                await self._wake.wait()
                self._reap()
                for guard in list(self._crash_guards.values()):
                    guard.check()
        finally:
            self._job.shared.in_flight.pop(self._job.job_id, None)
            await cancel_all((watch, *self._tasks))
            await self.early.closed()

    def add(self, batch: TicketBatch, groups: Iterable[Group]) -> None:
        """Add groups to a batch. A group's trajectories start together, on one worker."""
        groups = list(groups)
        for group in groups:
            batch.add([ticket.trajectory_id for ticket in group])
            for ticket in group:
                self._open[ticket.trajectory_id] = OpenTicket(batch, ticket)
                self._by_query.setdefault(ticket.query_id, set()).add(ticket.trajectory_id)
        last = self._waiting[-1] if self._waiting else None
        if groups and (
            last is None
            or (
                last[0].trajectory_id in self._open
                and self._priority_of(last) <= (batch.low_priority, batch.step)
            )
        ):  # last in the queue, so no sorting is needed
            self._waiting += groups
            self._wake.set()
        else:
            self._enqueue(groups)

    def withdraw(self, batch: TicketBatch, query_ids: Collection[str], reason: str) -> set[str]:
        """Stop waiting for queries that were ended in the store, and abort their running
        trajectories.

        Returns the trajectories that run until aborted.
        """
        gone = self._open_in(batch, query_ids)
        for trajectory_id in gone:
            self._close(trajectory_id)
        batch.remove(gone)
        there = self._abort_running(gone, reason)
        if len(there) < len(gone):
            self._enqueue(())
        self._wake.set()
        return there

    def _complete(self, batch: TicketBatch, query_id: str) -> None:
        """Withdraw the rest of a query whose group is complete in the store."""
        running = self.withdraw(batch, (query_id,), kinds.REDUNDANT)
        self._draining.update(dict.fromkeys(running, (batch, query_id)))
        batch.complete(query_id, running, self._job.spec.pipeline.group_size)

    def end_unreported(self, batch: TicketBatch, ended: Collection[str]) -> None:
        """Count trajectories as ended without a report, because the store ended them long ago and
        no worker reported them. A later report does not count."""
        unreported = {one for one in ended if one in self._open and self._open[one].batch is batch}
        draining = {one for one in ended if self._draining.get(one, (None,))[0] is batch}
        if not (gone := unreported | draining):
            return
        _log.warning("ends of trajectories were not reported", trajectory_ids=sorted(gone))
        self._abort_running(gone, _ENDED_BEFORE)
        for running in self._running.values():
            running -= gone
        for trajectory_id in unreported:
            self._close(trajectory_id)
            batch.end_unseen(trajectory_id)
        self._end_draining(draining)
        self._enqueue(())

    def _end_draining(self, trajectory_ids: Collection[str]) -> None:
        """Stop waiting for reports of the draining ones among these."""
        for trajectory_id in trajectory_ids:
            if (found := self._draining.pop(trajectory_id, None)) is not None:
                batch, query_id = found
                batch.end_unreported(query_id, trajectory_id)

    def move(self, source: TicketBatch, query_ids: Collection[str], target: TicketBatch) -> None:
        """Move queries to another batch. Their running trajectories continue."""
        moved = self._open_in(source, query_ids)
        for trajectory_id in moved:
            self._open[trajectory_id].batch = target
        target.add(moved)
        source.remove(moved)
        for query_id in query_ids:
            target.note_started(query_id, source.started.pop(query_id, {}))
        self._enqueue(())

    def describe(self, batch: TicketBatch) -> str:
        """Describe what the batch waits for."""
        where = ", ".join(f"{len(ids)} on {worker}" for worker, ids in self._running.items() if ids)
        if not where:
            return f"waiting for a ready rollout worker for {batch.open} trajectories"
        return f"waiting for {batch.open} trajectories ({where})"

    def _open_in(self, batch: TicketBatch, query_ids: Collection[str]) -> set[str]:
        return {
            trajectory_id
            for query_id in query_ids
            for trajectory_id in self._by_query.get(query_id, ())
            if self._open[trajectory_id].batch is batch
        }

    def _close(self, trajectory_id: str) -> None:
        if (guard := self._crash_guards.pop(trajectory_id, None)) is not None:
            guard.clear()
        query_id = self._open.pop(trajectory_id).ticket.query_id
        left = self._by_query[query_id]
        left.discard(trajectory_id)
        if not left:
            del self._by_query[query_id]

    def _enqueue(self, more: Collection[Group]) -> None:
        """Add groups to the queue in order of priority, and remove ended trajectories."""
        groups = [
            left
            for group in (*self._waiting, *more)
            if (left := [one for one in group if one.trajectory_id in self._open])
        ]
        # Stable: first in, first out within a step.
        groups.sort(key=self._priority_of)
        self._waiting = groups
        self._wake.set()

    def _priority_of(self, group: Group) -> tuple[bool, int]:
        batch = self._open[group[0].trajectory_id].batch
        return batch.low_priority, batch.step

    def _in_flight(self) -> int:
        """Return the trajectories in flight, and store them for `GetCluster`."""
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
        count = admission.due_wave(sizes, in_flight=in_flight, limit=self._limit)
        if not count:
            return
        groups, self._waiting = self._waiting[:count], self._waiting[count:]
        by_batch: dict[TicketBatch, list[Group]] = {}
        for group in groups:
            batch = self._open[group[0].trajectory_id].batch
            by_batch.setdefault(batch, []).append(group)
        left: list[Group] = []
        for batch, some in by_batch.items():
            left += self._start(batch, some)
        self._waiting = left + self._waiting
        self._in_flight()

    def _start(self, batch: TicketBatch, groups: list[Group]) -> list[Group]:
        """Send a batch's groups to ready workers; return the groups if no worker is ready."""
        workers = {
            worker.worker_id: worker
            for worker in self._engines.ready(batch.floors)
            if worker not in self._backing_off
        }
        if not workers:
            return groups
        loads = [
            admission.RolloutWorker(
                worker_id, len(self._running.get(worker, ())), self._shares.share(worker_id)
            )
            for worker_id, worker in workers.items()
        ]
        self._turn += 1
        chosen = admission.spread_queries([len(group) for group in groups], loads, turn=self._turn)
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

    async def _follow(self, worker: WorkerHandle, batch: TicketBatch, tickets: Group) -> None:
        """Run tickets on one worker to their ends; on failure, queue the remaining ones again."""
        request = rollout_pb.RunQueriesRequest(
            request_id=new_id("run"),
            job_id=self._job.job_id,
            step=batch.step,
            tickets=tickets,
            endings_only=True,
            together=True,
        )
        running = self._running[worker]
        # Tickets of this stream that have not ended. An ended trajectory may be dispatched again
        # under the same id before this stream is over; it then belongs to another stream.
        left = {ticket.trajectory_id for ticket in tickets}
        try:
            try:
                async with worker.while_alive():
                    stream = worker.rollout.RunQueries(request, timeout=batch.deadline.left)
                    async for first in stream:
                        self._handle_events(worker, _split(first), left)
            finally:
                running -= left
                self._end_draining(left)
            if lost := left & self._open.keys():
                raise Unavailable(f"{worker} ended its stream before {len(lost)} trajectories did")
        except TroupeError as error:
            await self._requeue(worker, left & self._open.keys(), error)

    def _handle_events(
        self, worker: WorkerHandle, events: list[rollout_pb.TrajectoryEvent], left: set[str]
    ) -> None:
        """Handle a message of a stream; remove ended tickets from `left`."""
        ended = {event.trajectory_id for event in events if self._handle_event(event)}
        if not ended:
            return
        for event in events:
            if event.state == common_pb.TRAJECTORY_STATE_COMPLETED:
                self._shares.ended(worker.worker_id, event.seconds)
        left -= ended
        if (running := self._running.get(worker)) is not None:
            running -= ended
        self._in_flight()
        if self._waiting:
            self._wake.set()
        if worker in self._attempts:
            self._attempts[worker].reset()

    def _handle_event(self, event: rollout_pb.TrajectoryEvent) -> bool:
        """Handle one event; return whether it ended a trajectory. Only the first ending counts."""
        if event.state in _ENDED and event.trajectory_id in self._draining:
            batch, _ = self._draining.pop(event.trajectory_id)
            batch.end_drained(event)
            return True
        ticket_state = self._open.get(event.trajectory_id)
        if ticket_state is not None:
            ticket_state.batch.note_started(event.query_id, event.start_versions)
        if event.state not in _ENDED:
            return False
        if ticket_state is not None:
            self._close(event.trajectory_id)
            ticket_state.batch.end(event)
            if event.group_complete:
                self._complete(ticket_state.batch, event.query_id)
        return True

    async def _requeue(
        self, worker: WorkerHandle, ids: Collection[str], error: TroupeError
    ) -> None:
        over: set[str] = set()
        for batch in {self._open[one].batch for one in ids}:
            over.update(await batch.ended())
        # Its group may be complete without the trajectories that run elsewhere.
        self._abort_running(over.difference(ids), kinds.REDUNDANT)
        left: dict[str, Group] = {}
        for trajectory_id in sorted(ids):
            if (ticket_state := self._open.get(trajectory_id)) is None:
                continue
            if trajectory_id in over:
                self._close(trajectory_id)
                ticket_state.batch.end_unseen(trajectory_id)
                continue
            left.setdefault(ticket_state.ticket.query_id, []).append(ticket_state.ticket)
            self._note_crash(trajectory_id, worker)
        self._enqueue(left.values())
        if error.kind in RENEWABLE:
            self._engines.lost_job(worker)
        elif not worker.alive:
            self._running.pop(worker, None)
            self._shares.forget(worker.worker_id)
        count = sum(len(group) for group in left.values())
        lasting = Deadline(f"work on {worker}", math.inf, "")
        attempts = self._attempts.setdefault(worker, RetryBackoff(lasting))
        self._backing_off.add(worker)
        self._wake.set()
        try:
            if attempts.worth_a_notice:
                await self._job.warn(
                    f"{worker}: {error}. {count} trajectories are dispatched again."
                )
            if worker.alive:
                await attempts.failed(error)
        finally:
            self._backing_off.discard(worker)
            self._wake.set()

    def _note_crash(self, trajectory_id: str, worker: WorkerHandle) -> None:
        guard = self._crash_guards.get(trajectory_id)
        if guard is None:
            guard = self._crash_guards[trajectory_id] = CrashLoopGuard(
                self._job.shared.workers,
                self._job.shared.deaths,
                self._job.job_id,
                self._job.spec.limits.worker_deaths,
                f"ran {trajectory_id}",
                "workflow",
                "Look into the rollout workers' logs for the cause: the workflow, a crash in "
                "one of its libraries, too little memory. Then resume the job.",
            )
        guard.note(worker)

    def _abort_running(self, trajectory_ids: Collection[str], reason: str) -> set[str]:
        """Abort the running ones among the trajectories, and return them."""
        found: set[str] = set()
        for worker, running in self._running.items():
            if there := running.intersection(trajectory_ids):
                found |= there
                self._spawn(self._abort(worker, sorted(there), reason))
        return found

    async def _abort(self, worker: WorkerHandle, trajectory_ids: list[str], reason: str) -> None:
        request = rollout_pb.AbortTrajectoriesRequest(
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


async def run_batch(
    dispatch: Dispatch,
    batch: TicketBatch,
    groups: Iterable[Group],
    background: Coroutine[Any, Any, None],
) -> None:
    """Run groups of trajectories to their ends, and `background` meanwhile.

    On an error or cancellation, aborts the trajectories that still run. Raises like
    `TicketBatch.finished`.
    """
    task = asyncio.create_task(background)
    query_ids: list[str] = []

    def noted() -> Iterator[Group]:
        for group in groups:
            query_ids.append(group[0].query_id)
            yield group

    try:
        await add_in_parts(dispatch, batch, noted())
        batch.seal()
        await batch.finished(lambda: dispatch.describe(batch))
    finally:
        dispatch.withdraw(batch, query_ids, "cancelled")
        await cancel_all([task])


async def add_in_parts(dispatch: Dispatch, batch: TicketBatch, groups: Iterable[Group]) -> None:
    """Add groups in parts, so that a step of 200,000 trajectories does not block the event loop,
    and with it heartbeats and users."""
    parts = iter(groups)
    while some := list(itertools.islice(parts, _PART_GROUPS)):
        dispatch.add(batch, some)
        await asyncio.sleep(0)


def _split(first: rollout_pb.TrajectoryEvent) -> list[rollout_pb.TrajectoryEvent]:
    """Return the events of a message, in order. Clears `together`, so that a reference to the first
    event does not keep all of them in memory."""
    events = [first, *first.together]
    first.ClearField("together")
    return events


class TicketBatch:
    """Trajectories that a step, an evaluation or a round of matches waits for.

    Tickets may be added until it is sealed. `on_end` is called with each trajectory's first ending;
    an error from it ends the batch. `ended` asks the experience store which trajectories have ended
    without a worker's report. A worker may run the tickets if it serves at least the versions
    `floors` (None: exactly the newest ones). A `low_priority` batch starts when nothing else waits.
    """

    def __init__(
        self,
        step: int,
        deadline: Deadline,
        on_end: Callable[[rollout_pb.TrajectoryEvent], None],
        *,
        floors: Mapping[str, int] | None = None,
        ended: Callable[[], Awaitable[Collection[str]]] | None = None,
        low_priority: bool = False,
    ) -> None:
        self.step = step
        self.low_priority = low_priority
        self.deadline = deadline
        self.floors = floors
        # Trajectories that ended in the store without a worker's report.
        self.unseen = 0
        # Trajectories whose end a worker reported.
        self.reported = 0
        # Oldest version of each policy at the start of a query's trajectories, by query.
        self.started: dict[str, dict[str, int]] = {}
        self._on_end = on_end
        self._ended_in_store = ended
        self._open: set[str] = set()
        # By query: reported completed trajectories. Complete groups with unreported members: their
        # size, and the trajectories that may be members.
        self._completed: Counter[str] = Counter()
        self._draining: dict[str, tuple[int, set[str]]] = {}
        self._sealed = False
        self._fault: TroupeError | None = None
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        """Trajectories that have not ended."""
        return len(self._open)

    def add(self, trajectory_ids: Collection[str]) -> None:
        """Wait for these too."""
        self._open.update(trajectory_ids)

    def remove(self, trajectory_ids: Collection[str]) -> None:
        """Stop waiting for these."""
        self._open.difference_update(trajectory_ids)
        self._changed.set()

    def seal(self) -> None:
        """Declare that no ticket will be added."""
        self._sealed = True
        self._changed.set()

    def note_started(self, query_id: str, versions: Mapping[str, int]) -> None:
        """Note the versions with which a trajectory of the query began."""
        if versions:
            oldest = self.started.setdefault(query_id, {})
            for policy, version in versions.items():
                oldest[policy] = min(version, oldest.get(policy, version))

    def end(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count the reported end of a trajectory."""
        self.remove((event.trajectory_id,))
        self._report(event)

    def complete(self, query_id: str, running: Collection[str], members: int) -> None:
        """Note that the store has all `members` of a query's group.

        Some of the trajectories still `running` may be members: an earlier member's ending may be
        reported after the last member's.
        """
        if running and self._completed[query_id] < members:
            self._draining[query_id] = (members, set(running))

    def end_drained(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count the reported end of a trajectory that was withdrawn while running, because its
        group was complete."""
        self._report(event)
        self._note_drained(event.query_id, event.trajectory_id)

    def end_unreported(self, query_id: str, trajectory_id: str) -> None:
        """Count a withdrawn trajectory whose end will not be reported anymore."""
        self.unseen += 1
        self._note_drained(query_id, trajectory_id)

    def _note_drained(self, query_id: str, trajectory_id: str) -> None:
        if (draining := self._draining.get(query_id)) is None:
            return
        members, running = draining
        running.discard(trajectory_id)
        if not running or self._completed[query_id] >= members:
            del self._draining[query_id]
            self._changed.set()

    def _report(self, event: rollout_pb.TrajectoryEvent) -> None:
        self.reported += 1
        self._completed[event.query_id] += event.state == common_pb.TRAJECTORY_STATE_COMPLETED
        try:
            self._on_end(event)
        except TroupeError as error:
            self.fail(error)

    def end_unseen(self, trajectory_id: str) -> None:
        """Count a trajectory that has ended in the store, without a report."""
        self.remove((trajectory_id,))
        self.unseen += 1

    def fail(self, error: TroupeError) -> None:
        """End the batch with a fault of the job."""
        self._fault = error
        self._changed.set()

    async def ended(self) -> Collection[str]:
        """Return the trajectories that have ended in the store; none if it is unreachable."""
        if self._ended_in_store is None:
            return ()
        try:
            return await self._ended_in_store()
        except TroupeError:
            return ()  # running one twice is safe: the store accepts only the first ending

    async def finished(self, describe: Callable[[], str]) -> None:
        """Wait until the batch is sealed and the ends of all its trajectories are known.

        Raises `TroupeError` for a fault of the job, or at the deadline with the text of `describe`.
        """
        while True:
            if self._fault is not None:
                raise self._fault
            if self._sealed and not self._open and not self._draining:
                return
            self._changed.clear()
            try:
                await self.deadline.wait(self._changed.wait())
            except TroupeError:
                self.deadline.report(describe())
                raise self.deadline.exhausted() from None


@dataclass
class OpenTicket:
    """The ticket of a trajectory that has not ended, and its batch."""

    batch: TicketBatch
    ticket: rollout_pb.Ticket


class EarlyStart:
    """Early setup of trajectories whose step is not open yet (`pipeline.early_start`).

    The rollout worker starts their environments and waits before the first turn until `Dispatch`
    sends the same tickets for their step. Nothing relies on the early start: any other trajectory
    begins with its step, and `close` discards unused ones without a trace.
    """

    def __init__(self, job: JobContext, engines: Engines) -> None:
        self._job = job
        self._engines = engines
        # Worker that has begun a query, by query.
        self._begun: dict[str, WorkerHandle] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, step: int, groups: Sequence[list[rollout_pb.Ticket]]) -> None:
        """Begin these, each group on one worker; discard earlier ones."""
        self.close()
        workers = {worker.worker_id: worker for worker in self._engines.ready()}
        if not workers:
            return
        loads = [admission.RolloutWorker(worker_id) for worker_id in workers]
        chosen = admission.spread_queries([len(group) for group in groups], loads, turn=step)
        together: dict[str, list[rollout_pb.Ticket]] = {}
        for worker_id, group in zip(chosen, groups, strict=True):
            together.setdefault(worker_id, []).extend(group)
        for worker_id, tickets in together.items():
            worker = workers[worker_id]
            self._begun.update((ticket.query_id, worker) for ticket in tickets)
            call = asyncio.create_task(self._hold_ahead(worker, step, tickets))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def worker_of(self, query_id: str, among: Collection[WorkerHandle]) -> WorkerHandle | None:
        """Return the worker that has begun a query, if it is one of `among`."""
        worker = self._begun.get(query_id)
        return worker if worker in among else None

    def close(self) -> None:
        """Discard unused early trajectories. Idempotent."""
        self._begun.clear()
        for call in self._calls:
            call.cancel()

    async def closed(self) -> None:
        """Close, and wait until the calls have ended."""
        self._begun.clear()
        await cancel_all(self._calls)

    async def _hold_ahead(
        self, worker: WorkerHandle, step: int, tickets: list[rollout_pb.Ticket]
    ) -> None:
        """Run the call during which the worker keeps early trajectories: until they have ended if
        they are used, and at most for the time limit of both steps."""
        request = rollout_pb.RunQueriesRequest(
            request_id=new_id("ahead"),
            job_id=self._job.job_id,
            step=step,
            tickets=tickets,
            endings_only=True,
            together=True,
            ahead=True,
        )
        try:
            async with worker.while_alive():
                limit = 2 * self._job.spec.limits.step_seconds
                async for _ in worker.rollout.RunQueries(request, timeout=limit):
                    pass
        except TroupeError as error:
            _log.info("not begun ahead", worker=str(worker), step=step, error=str(error))
        finally:
            for ticket in tickets:
                if self._begun.get(ticket.query_id) is worker:
                    del self._begun[ticket.query_id]
