"""Runs trajectories for whoever asks for them, each once, and ends those that nobody asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from services.rollout.prepared import PreparedJob
from services.rollout.trajectories.early_start import Ahead
from services.rollout.trajectories.records import TrajectoryLog
from services.rollout.trajectories.trajectory import RunningTrajectory
from troupe.endpoint.server import EndpointServer
from troupe.outcomes import described
from troupe.rpc.errors import Internal, TroupeError, Unavailable
from troupe.states import TRAJECTORY, is_terminal
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.wire import repeated

# Of one message, unless a single event is longer: far below what gRPC takes, and who listens can
# begin with the first while the next is on its way.
_MOST_BYTES: Final = 2**20


def messages(events: Sequence[rollout_pb.TrajectoryEvent]) -> Iterator[bytes]:
    """Serialized `TrajectoryEvent`s that hold `events` in their order, as few as may be.

    The events stay as they are: other streams send them, too.
    """
    parts: list[bytes] = []
    size = 0
    for event in events:
        part = event.SerializeToString()
        if parts and size + len(part) > _MOST_BYTES:
            yield _joined(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[bytes]) -> bytes:
    first, *others = parts
    return b"".join((first, *repeated(rollout_pb.TrajectoryEvent.TOGETHER_FIELD_NUMBER, others)))


log = structlog.get_logger(__name__)

_News = rollout.TrajectoryEvent | Exception


class TrajectoryListener:
    """Hears of a set of trajectories until all have ended, or until it is closed.

    Closed early, it leaves the trajectories that have not ended to whoever else listens; those
    of nobody are cancelled and leave no trace.
    """

    def __init__(
        self, runner: Runner, job_id: str, trajectory_ids: set[str], *, endings_only: bool
    ) -> None:
        self._runner = runner
        self._endings_only = endings_only
        self._job_id = job_id
        self._left = trajectory_ids
        self._news: asyncio.Queue[_News] = asyncio.Queue()

    def hear(self, news: _News, *, joins: bool = False) -> None:
        """Take an event, or the error that lost a trajectory. `joins`: it happened before."""
        if self._endings_only and not isinstance(news, Exception) and not _matters(news, joins):
            return
        self._news.put_nowait(news)

    async def bundles(self) -> AsyncIterator[list[rollout.TrajectoryEvent]]:
        """Events as they happen, those that are there at the same time together; in order, never
        none. Raises `TroupeError` when endings cannot be stored, after what happened before.
        """
        try:
            while self._left:
                news = await self._news.get()
                bundle = []
                while not isinstance(news, Exception):
                    if is_terminal(TRAJECTORY, news.state):
                        self._left.discard(news.trajectory_id)
                    bundle.append(news)
                    if self._news.empty():
                        break
                    news = self._news.get_nowait()
                if bundle:
                    yield bundle
                if isinstance(news, Exception):
                    raise news
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening. Repeatable."""
        left, self._left = self._left, set()
        for trajectory_id in left:
            self._runner.leave((self._job_id, trajectory_id), self)


@dataclass(eq=False)
class _Running:
    """A trajectory in flight with those who want to hear of it."""

    ahead: Ahead
    task: asyncio.Task[None] = field(init=False)
    listeners: set[TrajectoryListener] = field(default_factory=set)
    newest: rollout.TrajectoryEvent | None = None
    aborted: str = ""
    """Why, once it is to be aborted."""

    def cancel(self) -> None:
        """Cancel its task once that has begun, which it does in this turn of the event loop or the
        next: none of a task that is cancelled before runs, and nobody would hear of its end."""
        asyncio.get_running_loop().call_soon(self.task.cancel)

    def publish(self, news: _News) -> None:
        if isinstance(news, rollout.TrajectoryEvent):
            self.newest = news
        for listener in self.listeners:
            listener.hear(news)


class Runner:
    """All trajectories of this worker, by job and id."""

    def __init__(self, store: TrajectoryLog, endpoints: EndpointServer) -> None:
        self._store = store
        self._endpoints = endpoints
        self._running: dict[tuple[str, str], _Running] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def count(self, job_id: str) -> int:
        """Trajectories of a job in flight."""
        return sum(job == job_id for job, _ in self._running)

    def listen(
        self,
        job: PreparedJob,
        step: int,
        tickets: Sequence[rollout.Ticket],
        *,
        endings_only: bool = False,
        ahead: bool = False,
    ) -> TrajectoryListener:
        """Run the tickets; the listener hears of all of them.

        A trajectory that runs already is joined, not run twice. `endings_only`: of moves that end
        none the listener hears only where they tell which versions a trajectory began with.
        `ahead`: they wait, before a turn and before they end, for a call without it.
        """
        ids = {ticket.trajectory_id for ticket in tickets}
        listener = TrajectoryListener(self, job.job_id, ids, endings_only=endings_only)
        for ticket in tickets:
            key = (job.job_id, ticket.trajectory_id)
            running = self._running.get(key)
            if running is None:
                running = self._start(key, job, step, ticket, ahead)
            elif not ahead:
                running.ahead.end()
            running.listeners.add(listener)
            if running.newest is not None:
                listener.hear(running.newest, joins=True)
        return listener

    def updated(self, job_id: str, policy: str) -> None:
        """All engines of the policy serve its newest weights."""
        for (job, _), running in self._running.items():
            if job == job_id:
                running.ahead.release(policy)

    def abort(self, job_id: str, trajectory_ids: Iterable[str], reason: str) -> list[str]:
        """End trajectories as ABORTED, those that wait for a place included; which ones ran here.

        Returns before they have ended: their listeners hear of it. Repeatable.
        """
        found = []
        for trajectory_id in trajectory_ids:
            running = self._running.get((job_id, trajectory_id))
            if running is None or running.ahead.waits:  # of the latter the store knows nothing yet
                continue
            found.append(trajectory_id)
            if not running.aborted:
                running.aborted = reason
                running.cancel()
        return found

    async def cancel(self, job_id: str) -> None:
        """End the trajectories of a job, as if nobody had asked for them."""
        await self._cancel([r for (job, _), r in self._running.items() if job == job_id])

    async def stop(self) -> None:
        """Cancel everything that runs and wait until it has ended."""
        await self._cancel(list(self._running.values()))
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def leave(self, key: tuple[str, str], listener: TrajectoryListener) -> None:
        """`listener` goes; a trajectory that nobody listens to is cancelled."""
        running = self._running.get(key)
        if running is None or listener not in running.listeners:
            return
        running.listeners.discard(listener)
        if running.listeners:
            return
        # From now on the id is free: another call may run the trajectory while this one ends.
        del self._running[key]
        running.task.cancel()
        self._leaving.add(running.task)
        running.task.add_done_callback(self._leaving.discard)

    def _start(
        self,
        key: tuple[str, str],
        job: PreparedJob,
        step: int,
        ticket: rollout.Ticket,
        ahead: bool,
    ) -> _Running:
        running = _Running(Ahead(ahead))
        trajectory = _kind(job)(
            job, ticket, step, self._store, running.publish, self._endpoints, running.ahead
        )
        running.task = asyncio.create_task(
            self._live(key, running, trajectory), name=f"trajectory-{ticket.trajectory_id}"
        )
        self._running[key] = running
        job.groups.begin(ticket.query_id)
        running.task.add_done_callback(lambda _: job.groups.end(ticket.query_id))
        return running

    async def _live(
        self, key: tuple[str, str], running: _Running, trajectory: RunningTrajectory
    ) -> None:
        try:
            try:
                await trajectory.run()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                # Cancelled for both reasons, it is not to be stored.
                if not running.aborted or task.uncancel():
                    raise
                await trajectory.abort(running.aborted)
        except asyncio.CancelledError:
            running.publish(
                Unavailable(f"trajectory {key[1]} was cancelled", kind="trajectory_cancelled")
            )
            raise
        except Exception as error:
            # The store or Troupe itself failed: the listener's call fails, so that the
            # trajectory is given to somebody again.
            known = isinstance(error, TroupeError)
            log.error("a trajectory was lost", error=described(error), exc_info=not known)
            running.publish(error)
        except BaseException as error:
            # Nobody would hear of its end otherwise: their call would last as long as the step.
            log.exception("a trajectory was lost")
            running.publish(Internal(described(error), kind="trajectory_lost"))
            raise
        finally:
            if self._running.get(key) is running:
                del self._running[key]

    async def _cancel(self, doomed: Sequence[_Running]) -> None:
        for running in doomed:
            running.cancel()
        await asyncio.gather(*(r.task for r in doomed), return_exceptions=True)


def _kind(job: PreparedJob) -> type[RunningTrajectory]:
    if job.arena is None:
        return RunningTrajectory
    # Where there is an arena torch has been imported, which takes seconds.
    from services.rollout.networks.episodes import EpisodeRunner

    return EpisodeRunner


def _matters(event: rollout.TrajectoryEvent, joins: bool) -> bool:
    """Whether it is an ending, or the first to tell a listener of versions."""
    if is_terminal(TRAJECTORY, event.state):
        return True
    return bool(event.start_versions) and (joins or event.state == pb.TRAJECTORY_STATE_RUNNING)
