"""Gives tickets to rollout workers until every trajectory has ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.engines import Engines
from services.orchestrator.faults import RENEWABLE, Attempts, Patience, job_fault
from services.orchestrator.victims import Victims
from services.orchestrator.workers import Worker
from troupe.rpc import TroupeError, Unavailable, new_id
from troupe.scheduling import admission, placement
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as ro

_ENDED: Final = frozenset(
    {pb.TRAJECTORY_STATE_COMPLETED, pb.TRAJECTORY_STATE_FAILED, pb.TRAJECTORY_STATE_ABORTED}
)
# Another wave starts when a quarter of the window is free: a call per wave, not per trajectory.
_WAVE_FRACTION: Final = 0.25
Group = list[ro.Ticket]


class Dispatch:
    """One batch of trajectories. A stream that breaks, or a worker that is lost, costs nothing
    but time: what it had not ended goes to whoever is ready.

    `on_end` sees each trajectory's first ending; what it raises ends the dispatch. `ended` asks
    the experience store which trajectories have ended although nobody said so.
    """

    def __init__(
        self,
        job: JobContext,
        engines: Engines,
        step: int,
        patience: Patience,
        on_end: Callable[[ro.TrajectoryEvent], None],
        ended: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        self._job = job
        self._engines = engines
        self._step = step
        self._patience = patience
        self._on_end = on_end
        self._ended = ended
        self._limit = job.spec.limits.max_concurrent_trajectories
        self._open: dict[str, ro.Ticket] = {}
        self._waiting: deque[Group] = deque()
        # Trajectories per worker that are dispatched and not ended.
        self._running: dict[Worker, set[str]] = {}
        self._streams: set[asyncio.Task[None]] = set()
        # A worker that just failed, until its pause is over.
        self._resting: set[Worker] = set()
        self._attempts: dict[Worker, Attempts] = {}
        # By trajectory: what kills its worker is run again only so often.
        self._victims: dict[str, Victims] = {}
        self._wake = asyncio.Event()
        self._turn = step
        self._fault: TroupeError | None = None

    def _in_flight(self) -> int:
        """Trajectories dispatched and not ended; also told to whoever pictures the cluster."""
        count = sum(len(running) for running in self._running.values())
        self._job.shared.in_flight[self._job.job_id] = count
        return count

    async def run(self, groups: Iterable[Group]) -> None:
        """Return when every ticket's trajectory has ended. Raises `TroupeError`: a fault of the
        job, the deadline, or what `on_end` raised."""
        for group in groups:
            self._waiting.append(group)
            self._open.update((ticket.trajectory_id, ticket) for ticket in group)
        watch = asyncio.create_task(self._watch_engines())
        try:
            while self._open:
                self._start_wave()
                self._patience.say(self._describe())
                self._wake.clear()
                await self._patience.wait(self._wake.wait())
                self._reap()
                for victims in self._victims.values():
                    victims.check()
                if self._fault is not None:
                    raise self._fault
        finally:
            self._job.shared.in_flight.pop(self._job.job_id, None)
            watch.cancel()
            for stream in self._streams:
                stream.cancel()
            await asyncio.gather(watch, *self._streams, return_exceptions=True)

    def _describe(self) -> str:
        if self._running:
            where = ", ".join(
                f"{len(ids)} on {worker}" for worker, ids in self._running.items() if ids
            )
            return f"waiting for {len(self._open)} trajectories ({where or 'none dispatched'})"
        return f"waiting for a ready rollout worker for {len(self._open)} trajectories"

    def _start_wave(self) -> None:
        workers = {
            worker.worker_id: worker
            for worker in self._engines.ready()
            if worker not in self._resting
        }
        in_flight = self._in_flight()
        if not self._waiting or not workers:
            return
        sizes = [len(group) for group in self._waiting]
        count = admission.next_wave(sizes, in_flight=in_flight, limit=self._limit)
        if count < len(sizes) and in_flight > (1 - _WAVE_FRACTION) * self._limit:
            return
        loads = [
            placement.RolloutWorker(worker_id, len(self._running.get(worker, ())))
            for worker_id, worker in workers.items()
        ]
        self._turn += 1
        chosen = placement.spread_queries(sizes[:count], loads, turn=self._turn)
        tickets: dict[str, Group] = {}
        for worker_id in chosen:
            tickets.setdefault(worker_id, []).extend(self._waiting.popleft())
        for worker_id, group in tickets.items():
            self._start_stream(workers[worker_id], group)
        self._in_flight()

    def _start_stream(self, worker: Worker, tickets: Group) -> None:
        ids = {ticket.trajectory_id for ticket in tickets}
        self._running.setdefault(worker, set()).update(ids)
        stream = asyncio.create_task(self._follow(worker, tickets))
        self._streams.add(stream)
        stream.add_done_callback(lambda _: self._wake.set())

    def _reap(self) -> None:
        for stream in [stream for stream in self._streams if stream.done()]:
            self._streams.discard(stream)
            stream.result()

    async def _follow(self, worker: Worker, tickets: Group) -> None:
        """Run tickets on one worker to their end, or give back what is left of them."""
        request = ro.RunQueriesRequest(
            request_id=new_id("run"), job_id=self._job.job_id, step=self._step, tickets=tickets
        )
        running = self._running[worker]
        try:
            async with worker.while_alive():
                stream = worker.rollout.RunQueries(request, timeout=self._patience.left)
                async for event in stream:
                    if self._take(event):
                        running.discard(event.trajectory_id)
                        self._in_flight()
                        if worker in self._attempts:
                            self._attempts[worker].reset()
            left = [ticket for ticket in tickets if ticket.trajectory_id in self._open]
            if left:
                raise Unavailable(f"{worker} ended its stream before {len(left)} trajectories did")
        except TroupeError as error:
            running.difference_update(ticket.trajectory_id for ticket in tickets)
            await self._give_back(worker, tickets, error)

    def _take(self, event: ro.TrajectoryEvent) -> bool:
        """Whether the event ended a trajectory. Only its first ending counts."""
        if event.HasField("problem"):
            self._fail(job_fault(event.problem))
        if event.state not in _ENDED:
            return False
        if self._open.pop(event.trajectory_id, None) is not None:
            try:
                self._on_end(event)
            except TroupeError as error:
                self._fail(error)
            if self._waiting or not self._open:
                self._wake.set()
        return True

    def _fail(self, error: TroupeError) -> None:
        """End the dispatch: this is not the worker's fault."""
        self._fault = error
        self._wake.set()

    async def _give_back(self, worker: Worker, tickets: Group, error: TroupeError) -> None:
        left: dict[str, Group] = {}
        over = await self._ended_unseen()
        for ticket in tickets:
            if ticket.trajectory_id in over:
                self._open.pop(ticket.trajectory_id, None)
            elif ticket.trajectory_id in self._open:
                left.setdefault(ticket.query_id, []).append(ticket)
                self._note_victim(ticket.trajectory_id, worker)
        self._waiting.extend(left.values())
        if error.kind in RENEWABLE:
            self._engines.lost_job(worker)
        elif not worker.alive:
            self._running.pop(worker, None)
        count = sum(len(group) for group in left.values())
        attempts = self._attempts.setdefault(worker, Attempts(self._patience))
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
                f"ran {trajectory_id}",
                "workflow",
                "Look into the rollout workers' logs for what ended them: the workflow, a crash in "
                "a library of its, too little memory. Then resume the job.",
            )
        victims.note(worker)

    async def _ended_unseen(self) -> Collection[str]:
        if self._ended is None:
            return ()
        try:
            return await self._ended()
        except TroupeError:
            return ()  # running one twice is safe: the store takes the first ending only

    async def _watch_engines(self) -> None:
        while True:
            await self._engines.change()
            self._wake.set()
