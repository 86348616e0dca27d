"""The runner of requested trajectories, which runs each once and cancels those without a
listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from services.rollout.garbage import collect_survivors
from services.rollout.prepared_job import PreparedJob
from services.rollout.program import Trajectory
from services.rollout.trajectories.concurrency import EarlyStartGate
from services.rollout.trajectories.records import TrajectoryLog
from troupe.endpoint.server import EndpointServer
from troupe.functions.shipped import opened, using
from troupe.outcomes import described
from troupe.rpc.errors import Internal, TroupeError, Unavailable
from troupe.rpc.protobuf_wire import repeated
from troupe.states import TRAJECTORY, is_terminal
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

log = structlog.get_logger(__name__)

# Size of one message, unless a single event is larger: far below gRPC's limit, so that the client
# can process the first while the next is on its way.
_MAX_MESSAGE_BYTES: Final = 2**20
# Trajectories that are started in one iteration of the event loop: thousands together took a third
# of a second or more.
_STARTS_PER_TICK: Final = 16
# Number of running trajectories below which the garbage collector may walk all objects at once.
_FEW: Final = 16

_Update = rollout_pb.TrajectoryEvent | Exception


class Runner:
    """All trajectories of this worker, by job and id."""

    def __init__(self, store: TrajectoryLog, endpoints: EndpointServer) -> None:
        self._store = store
        self._endpoints = endpoints
        self._running: dict[tuple[str, str], _Running] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def listen(
        self,
        job: PreparedJob,
        step: int,
        tickets: Sequence[rollout_pb.Ticket],
        *,
        endings_only: bool = False,
        ahead: bool = False,
    ) -> TrajectoryListener:
        """Run the tickets, starting a few at a time; return a listener to all of them.

        A trajectory that already runs is joined, not run twice. `endings_only`: in addition to
        endings, the listener gets only events that report start versions. `ahead`: the trajectories
        start early; before a turn and before their end they wait until a call without `ahead` names
        them.
        """
        ids = {ticket.trajectory_id for ticket in tickets}
        listener = TrajectoryListener(self, job.job_id, ids, endings_only=endings_only)
        try:
            for number, ticket in enumerate(tickets):
                if number and number % _STARTS_PER_TICK == 0:
                    await asyncio.sleep(0)
                    if listener.failed:  # the job was released
                        break
                key = (job.job_id, ticket.trajectory_id)
                running = self._running.get(key)
                if running is None:
                    running = self._start(key, job, step, ticket, ahead)
                elif not ahead:
                    running.early_start.open_step()
                running.listeners.add(listener)
                if running.newest is not None:
                    listener.deliver(running.newest, replayed=True)
        except BaseException:  # the caller has gone
            listener.close()
            raise
        return listener

    def policy_updated(self, job_id: str, policy: str) -> None:
        """Let early trajectories draw turns of a policy whose engines have its newest weights."""
        for (job, _), running in self._running.items():
            if job == job_id:
                running.early_start.policy_updated(policy)

    def abort(self, job_id: str, trajectory_ids: Iterable[str], reason: str) -> list[str]:
        """End trajectories, including waiting ones, as ABORTED; return the ids that ran here.

        Returns before they have ended; listeners get the end. Repeatable.
        """
        aborted_ids = []
        for trajectory_id in trajectory_ids:
            running = self._running.get((job_id, trajectory_id))
            # an early trajectory is unknown to the store
            if running is None or running.early_start.waits:
                continue
            aborted_ids.append(trajectory_id)
            if not running.aborted:
                running.aborted = reason
                running.cancel()
        return aborted_ids

    async def cancel(self, job_id: str) -> None:
        """Cancel the trajectories of a job without storing anything."""
        await self._cancel([r for (job, _), r in self._running.items() if job == job_id])

    async def stop(self) -> None:
        """Cancel all trajectories and wait until they have ended."""
        await self._cancel(list(self._running.values()))
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def leave(self, key: tuple[str, str], listener: TrajectoryListener) -> None:
        """Remove `listener` from a trajectory, which is cancelled if it has no other."""
        running = self._running.get(key)
        if running is None or listener not in running.listeners:
            return
        running.listeners.discard(listener)
        if running.listeners:
            return
        # The id is free from now on, so another call may run the trajectory while this one ends.
        del self._running[key]
        running.task.cancel()
        self._leaving.add(running.task)
        running.task.add_done_callback(self._leaving.discard)

    def _start(
        self,
        key: tuple[str, str],
        job: PreparedJob,
        step: int,
        ticket: rollout_pb.Ticket,
        ahead: bool,
    ) -> _Running:
        running = _Running(EarlyStartGate(ahead))
        trajectory = job.program.trajectory(ticket.split)(
            job, ticket, step, self._store, running.publish, self._endpoints, running.early_start
        )
        running.task = asyncio.create_task(
            self._supervise(key, job, running, trajectory),
            name=f"trajectory-{ticket.trajectory_id}",
        )
        self._running[key] = running
        job.groups.begin(ticket.query_id)
        running.task.add_done_callback(lambda _: job.groups.end(ticket.query_id))
        return running

    async def _supervise(
        self,
        key: tuple[str, str],
        job: PreparedJob,
        running: _Running,
        trajectory: Trajectory,
    ) -> None:
        try:
            try:
                with using(opened(job.spec.code.sha256) if job.spec.code else None):
                    await trajectory.run()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                # If it was also cancelled for another reason, it must not be stored.
                if not running.aborted or task.uncancel():
                    raise
                await trajectory.abort(running.aborted)
        except asyncio.CancelledError:
            running.publish(
                Unavailable(f"trajectory {key[1]} was cancelled", kind="trajectory_cancelled")
            )
            raise
        except Exception as error:
            # The store or Troupe itself failed: the listener's call fails, and the trajectory is
            # assigned again.
            known = isinstance(error, TroupeError)
            log.error("a trajectory was lost", error=described(error), exc_info=not known)
            running.publish(error)
        except BaseException as error:
            # Without an event the listeners' calls would last as long as the step.
            log.exception("a trajectory was lost")
            running.publish(Internal(described(error), kind="trajectory_lost"))
            raise
        finally:
            if self._running.get(key) is running:
                del self._running[key]
            if len(self._running) <= _FEW:
                collect_survivors()

    async def _cancel(self, cancelled: Sequence[_Running]) -> None:
        for running in cancelled:
            running.cancel()
        await asyncio.gather(*(r.task for r in cancelled), return_exceptions=True)


class TrajectoryListener:
    """A listener to the events of a set of trajectories, until all have ended or it is closed.

    A trajectory whose last listener is closed early is cancelled and leaves no trace.
    """

    def __init__(
        self, runner: Runner, job_id: str, trajectory_ids: set[str], *, endings_only: bool
    ) -> None:
        self._runner = runner
        self._endings_only = endings_only
        self._job_id = job_id
        self._left = trajectory_ids
        self._updates: asyncio.Queue[_Update] = asyncio.Queue()
        self.failed = False
        """Whether a trajectory was lost; then `bundles` ends with its error."""

    def deliver(self, update: _Update, *, replayed: bool = False) -> None:
        """Queue an event, or the error that lost a trajectory. `replayed`: it is an older event."""
        self.failed = self.failed or isinstance(update, Exception)
        if self._endings_only and not isinstance(update, Exception):
            # The listener gets endings, and the first event with start versions.
            first = replayed or update.state == common_pb.TRAJECTORY_STATE_RUNNING
            if not is_terminal(TRAJECTORY, update.state) and not (update.start_versions and first):
                return
        self._updates.put_nowait(update)

    async def bundles(self) -> AsyncIterator[list[rollout_pb.TrajectoryEvent]]:
        """Yield non-empty lists of the events that are available at the same time, in order. If a
        trajectory was lost (its end cannot be stored), raise its `TroupeError` after the earlier
        events."""
        try:
            while self._left:
                update = await self._updates.get()
                bundle = []
                while not isinstance(update, Exception):
                    if is_terminal(TRAJECTORY, update.state):
                        self._left.discard(update.trajectory_id)
                    bundle.append(update)
                    if self._updates.empty():
                        break
                    update = self._updates.get_nowait()
                if bundle:
                    yield bundle
                if isinstance(update, Exception):
                    raise update
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening. Repeatable."""
        left, self._left = self._left, set()
        for trajectory_id in left:
            self._runner.leave((self._job_id, trajectory_id), self)


@dataclass(eq=False)
class _Running:
    """A trajectory in flight with its listeners."""

    early_start: EarlyStartGate
    task: asyncio.Task[None] = field(init=False)
    listeners: set[TrajectoryListener] = field(default_factory=set)
    newest: rollout_pb.TrajectoryEvent | None = None
    aborted: str = ""
    """The reason of an abort; empty: not aborted."""

    def cancel(self) -> None:
        """Cancel its task after the task has started, in this or the next event-loop iteration: a
        task that is cancelled before it starts runs no handler, and no listener would get its
        end."""
        asyncio.get_running_loop().call_soon(self.task.cancel)

    def publish(self, update: _Update) -> None:
        if isinstance(update, rollout_pb.TrajectoryEvent):
            self.newest = update
        for listener in self.listeners:
            listener.deliver(update)


def messages(events: Sequence[rollout_pb.TrajectoryEvent]) -> Iterator[bytes]:
    """Yield serialized `TrajectoryEvent`s that contain `events` in order, in as few messages as
    possible. The events are not changed, since other streams send them as well."""
    parts: list[bytes] = []
    size = 0
    for event in events:
        part = event.SerializeToString()
        if parts and size + len(part) > _MAX_MESSAGE_BYTES:
            yield _joined(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[bytes]) -> bytes:
    first, *others = parts
    return b"".join((first, *repeated(rollout_pb.TrajectoryEvent.TOGETHER_FIELD_NUMBER, others)))
