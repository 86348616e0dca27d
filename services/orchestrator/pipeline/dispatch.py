"""Gives tickets to rollout workers until every trajectory has ended."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.errors import RENEWABLE, Deadline, RetryBackoff, job_fault
from services.orchestrator.pipeline.metrics import REDUNDANT
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.workers import WorkerHandle
from troupe.rpc import TroupeError, Unavailable, new_id
from troupe.scheduling import admission
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as ro


class TicketBatch:
    """What is waited for together. Tickets may be added until it is `sealed`.

    `on_end` sees each trajectory's first ending; what it raises ends the batch. `ended` asks the
    experience store which trajectories have ended although nobody said so. A worker may run them
    when it serves at least the versions `floors` (None: exactly the newest ones). What runs `aside`
    starts when nothing else waits.
    """

    def __init__(
        self,
        step: int,
        patience: Deadline,
        on_end: Callable[[ro.TrajectoryEvent], None],
        *,
        floors: Mapping[str, int] | None = None,
        ended: Callable[[], Awaitable[Collection[str]]] | None = None,
        aside: bool = False,
    ) -> None:
        self.step = step
        self.aside = aside
        self.patience = patience
        self.floors = floors
        # Trajectories that ended, says the store, while whoever ran them could not tell.
        self.unseen = 0
        # Trajectories that ended, says who ran them.
        self.told = 0
        # By query: the oldest version of each policy that its trajectories started with.
        self.started: dict[str, dict[str, int]] = {}
        self._on_end = on_end
        self._ask = ended
        self._open: set[str] = set()
        # By query: trajectories that completed, as far as was told; of groups that are complete and
        # of which not all members were told, how many there are, and who may be one.
        self._completed: Counter[str] = Counter()
        self._parting: dict[str, tuple[int, set[str]]] = {}
        self._sealed = False
        self._fault: TroupeError | None = None
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        """Trajectories that have not ended."""
        return len(self._open)

    def add(self, trajectory_ids: Collection[str]) -> None:
        """These are waited for, too."""
        self._open.update(trajectory_ids)

    def remove(self, trajectory_ids: Collection[str]) -> None:
        """These are not waited for any more."""
        self._open.difference_update(trajectory_ids)
        self._changed.set()

    def seal(self) -> None:
        """Nothing will be added."""
        self._sealed = True
        self._changed.set()

    def note_started(self, query_id: str, versions: Mapping[str, int]) -> None:
        """A trajectory of the query began with these versions."""
        if versions:
            oldest = self.started.setdefault(query_id, {})
            for policy, version in versions.items():
                oldest[policy] = min(version, oldest.get(policy, version))

    def end(self, event: ro.TrajectoryEvent) -> None:
        """A trajectory has ended."""
        self.remove((event.trajectory_id,))
        self._tell(event)

    def complete(self, query_id: str, running: Collection[str], members: int) -> None:
        """The store has all `members` of a query's group. Which of those that are `running` are
        members it does not say: a member's ending may be told after that of the last one."""
        if running and self._completed[query_id] < members:
            self._parting[query_id] = (members, set(running))

    def end_withdrawn(self, event: ro.TrajectoryEvent) -> None:
        """A trajectory has ended whose group was complete; its last words count."""
        self._tell(event)
        self._part(event.query_id, event.trajectory_id)

    def end_untold(self, query_id: str, trajectory_id: str) -> None:
        """Nobody will say any more how a trajectory ended whose group was complete."""
        self.unseen += 1
        self._part(query_id, trajectory_id)

    def _part(self, query_id: str, trajectory_id: str) -> None:
        if (parting := self._parting.get(query_id)) is None:
            return
        members, running = parting
        running.discard(trajectory_id)
        if not running or self._completed[query_id] >= members:
            del self._parting[query_id]
            self._changed.set()

    def _tell(self, event: ro.TrajectoryEvent) -> None:
        self.told += 1
        self._completed[event.query_id] += event.state == pb.TRAJECTORY_STATE_COMPLETED
        try:
            self._on_end(event)
        except TroupeError as error:
            self.fail(error)

    def end_unseen(self, trajectory_id: str) -> None:
        """A trajectory has ended, and how is not known here."""
        self.remove((trajectory_id,))
        self.unseen += 1

    def fail(self, error: TroupeError) -> None:
        """A fault of the job, not of a worker."""
        self._fault = error
        self._changed.set()

    async def ended(self) -> Collection[str]:
        """What has ended although nobody said so, as far as the store can be asked."""
        if self._ask is None:
            return ()
        try:
            return await self._ask()
        except TroupeError:
            return ()  # running one twice is safe: the store takes the first ending only

    async def finished(self, describe: Callable[[], str]) -> None:
        """Return when all trajectories have ended, what ended is known, and none can be added.

        Raises `TroupeError`: a fault of the job, or the deadline with what `describe` says.
        """
        while True:
            if self._fault is not None:
                raise self._fault
            if self._sealed and not self._open and not self._parting:
                return
            self._changed.clear()
            try:
                await self.patience.wait(self._changed.wait())
            except TroupeError:
                self.patience.say(describe())
                raise self.patience.exhausted() from None


@dataclass
class Flight:
    """A trajectory that has not ended, and whose it is."""

    batch: TicketBatch
    ticket: ro.Ticket


class Draining:
    """Redundant ones that were withdrawn while they ran: how far they came is still to be told, and
    some may be members of their group."""

    def __init__(self) -> None:
        # With its query.
        self._batches: dict[str, tuple[TicketBatch, str]] = {}

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._batches

    def add(
        self, batch: TicketBatch, query_id: str, running: Collection[str], members: int
    ) -> None:
        """These of a query run, and the store has all `members` of its group."""
        self._batches.update(dict.fromkeys(running, (batch, query_id)))
        batch.complete(query_id, running, members)

    def of(self, batch: TicketBatch, trajectory_ids: Collection[str]) -> set[str]:
        """Which of these are parting from this batch."""
        return {one for one in trajectory_ids if one in self and self._batches[one][0] is batch}

    def end(self, event: ro.TrajectoryEvent) -> None:
        """One of them has ended."""
        batch, _ = self._batches.pop(event.trajectory_id)
        batch.end_withdrawn(event)

    def end_untold(self, trajectory_ids: Collection[str]) -> None:
        """Nobody will say any more how these ended, as far as they are parting."""
        for trajectory_id in trajectory_ids:
            if (found := self._batches.pop(trajectory_id, None)) is not None:
                batch, query_id = found
                batch.end_untold(query_id, trajectory_id)


_log = structlog.get_logger(__name__)


class EarlyStart:
    """Has rollout workers begin trajectories whose step is not open (`pipeline.early_start`).

    They wait there, without a turn and without an end, until the dispatch asks for the same ones
    as its step's. Nothing relies on it: what was not begun, or is lost, begins with its step, and
    what nobody comes to ask for ends without a trace when `close` gives it up.
    """

    def __init__(self, job: JobContext, engines: Engines) -> None:
        self._job = job
        self._engines = engines
        # By query: who has begun it.
        self._begun: dict[str, WorkerHandle] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, step: int, groups: Sequence[list[ro.Ticket]]) -> None:
        """Begin these, each group on one worker; what was begun before is given up."""
        self.close()
        workers = {worker.worker_id: worker for worker in self._engines.ready()}
        if not workers:
            return
        loads = [admission.RolloutWorker(worker_id) for worker_id in workers]
        chosen = admission.spread_queries([len(group) for group in groups], loads, turn=step)
        together: dict[str, list[ro.Ticket]] = {}
        for worker_id, group in zip(chosen, groups, strict=True):
            together.setdefault(worker_id, []).extend(group)
        for worker_id, tickets in together.items():
            worker = workers[worker_id]
            self._begun.update((ticket.query_id, worker) for ticket in tickets)
            call = asyncio.create_task(self._hold(worker, step, tickets))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def worker_of(self, query_id: str, among: Collection[WorkerHandle]) -> WorkerHandle | None:
        """Who has begun a query, if that is one of `among`."""
        worker = self._begun.get(query_id)
        return worker if worker in among else None

    def close(self) -> None:
        """Give up what nobody has asked for. Repeatable."""
        self._begun.clear()
        for call in self._calls:
            call.cancel()

    async def closed(self) -> None:
        """Close, and wait for it."""
        self.close()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _hold(self, worker: WorkerHandle, step: int, tickets: list[ro.Ticket]) -> None:
        """Whoever began them keeps them for as long as this call lasts: to their end, if they are
        asked for; to the end of both steps at the latest."""
        request = ro.RunQueriesRequest(
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
        self._running: dict[WorkerHandle, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A worker that just failed, until its pause is over.
        self._resting: set[WorkerHandle] = set()
        self._attempts: dict[WorkerHandle, RetryBackoff] = {}
        self._parting = Draining()
        self.early = EarlyStart(job, engines)
        # By trajectory: what kills its worker is run again only so often.
        self._victims: dict[str, CrashLoopGuard] = {}
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

    def add(self, batch: TicketBatch, groups: Iterable[Group]) -> None:
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

    def withdraw(self, batch: TicketBatch, query_ids: Collection[str], reason: str) -> set[str]:
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

    def _complete(self, batch: TicketBatch, query_id: str) -> None:
        """The store has all members of the query's group: the rest of it is redundant."""
        running = self.withdraw(batch, (query_id,), REDUNDANT)
        self._parting.add(batch, query_id, running, self._job.spec.pipeline.group_size)

    def end_untold(self, batch: TicketBatch, ended: Collection[str]) -> None:
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

    def move(self, source: TicketBatch, query_ids: Collection[str], target: TicketBatch) -> None:
        """These queries go on in another batch; what runs of them runs on."""
        moved = self._of(source, query_ids)
        for trajectory_id in moved:
            self._open[trajectory_id].batch = target
        target.add(moved)
        source.remove(moved)
        for query_id in query_ids:
            target.note_started(query_id, source.started.pop(query_id, {}))
        self._wait(())

    def describe(self, batch: TicketBatch) -> str:
        """Where the trajectories of a batch are."""
        where = ", ".join(f"{len(ids)} on {worker}" for worker, ids in self._running.items() if ids)
        if not where:
            return f"waiting for a ready rollout worker for {batch.open} trajectories"
        return f"waiting for {batch.open} trajectories ({where})"

    def _of(self, batch: TicketBatch, query_ids: Collection[str]) -> set[str]:
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
        """Give a batch's groups to workers; returns them when there is none."""
        workers = {
            worker.worker_id: worker
            for worker in self._engines.ready(batch.floors)
            if worker not in self._resting
        }
        if not workers:
            return groups
        loads = [
            admission.RolloutWorker(worker_id, len(self._running.get(worker, ())))
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

    def _hear(self, worker: WorkerHandle, events: list[ro.TrajectoryEvent], left: set[str]) -> None:
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

    async def _give_back(
        self, worker: WorkerHandle, ids: Collection[str], error: TroupeError
    ) -> None:
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
        lasting = Deadline(f"work on {worker}", math.inf, "")
        attempts = self._attempts.setdefault(worker, RetryBackoff(lasting))
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

    def _note_victim(self, trajectory_id: str, worker: WorkerHandle) -> None:
        victims = self._victims.get(trajectory_id)
        if victims is None:
            victims = self._victims[trajectory_id] = CrashLoopGuard(
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

    async def _abort(self, worker: WorkerHandle, trajectory_ids: list[str], reason: str) -> None:
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


async def add_in_parts(dispatch: Dispatch, batch: TicketBatch, groups: Iterable[Group]) -> None:
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
