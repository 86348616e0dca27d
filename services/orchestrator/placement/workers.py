"""The registry of rollout and trainer workers, kept up by their heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog

from services.orchestrator.errors import Deadline, cancel_all
from services.orchestrator.settings import OrchestratorSettings
from troupe.rpc import AlreadyExists, ClientSettings, RetryPolicy, Unavailable, connect
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

_log = structlog.get_logger(__name__)
# Few attempts: callers continue with another worker when one is unreachable.
_RETRY: Final = RetryPolicy(max_attempts=2)
# How long lost workers stay listed.
_REMEMBER_SECONDS: Final = 120.0
# States in which a binding holds no device.
AWAY: Final = frozenset({common_pb.BINDING_STATE_RELEASED, common_pb.BINDING_STATE_SUSPENDED})
NAMES: Final = {
    orchestrator_pb.WORKER_KIND_ROLLOUT: "rollout",
    orchestrator_pb.WORKER_KIND_TRAINER: "trainer",
}


class WorkerHandle:
    """One worker process: its newest heartbeat and a channel to it."""

    def __init__(
        self, beat: orchestrator_pb.HeartbeatRequest, client: ClientSettings, now: float
    ) -> None:
        self.worker_id = beat.worker_id
        self.kind = beat.kind
        self.address = beat.address
        self.beat = beat
        self.seen = now
        self.alive = True
        # Scopes of `while_alive` that end when the worker is lost.
        self._scopes: set[asyncio.Timeout] = set()
        self._channel = connect(beat.address, client)
        self.rollout = rollout_grpc.RolloutStub(self._channel)
        self.trainer = trainer_grpc.TrainerStub(self._channel)

    @asynccontextmanager
    async def while_alive(self) -> AsyncIterator[None]:
        """Cancel its body when the worker is lost, and raise `Unavailable` instead."""
        if not self.alive:
            raise self._gone()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if scope.expired():
                raise self._gone() from None
            raise

    def lose(self) -> None:
        """Mark the worker as lost for good: one that comes back gets another `WorkerHandle`."""
        self.alive = False
        now = asyncio.get_running_loop().time()
        for scope in list(self._scopes):
            scope.reschedule(now)

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self} at {self.address} was lost", kind="worker_lost")

    @property
    def usable(self) -> bool:
        """Whether it may get new work."""
        return self.alive and not self.beat.draining

    @property
    def holds(self) -> set[tuple[str, str]]:
        """The policies on its devices, by job and name, as of its newest heartbeat."""
        return {(one.job_id, one.policy) for one in self.beat.bindings if one.state not in AWAY}

    def __str__(self) -> str:
        return f"{NAMES.get(self.kind, 'unknown')} worker {self.worker_id}"

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)


class WorkerRegistry:
    """All workers that send heartbeats.

    A worker is lost after missed heartbeats, when its event loop does not advance, or when another
    process reports from its address.
    """

    def __init__(
        self, settings: OrchestratorSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._client = settings.client(retry=_RETRY)
        self._clock = clock
        self._workers: dict[str, WorkerHandle] = {}
        # By the id of a replaced worker: the worker that reports from its address since.
        self._replaced: dict[str, WorkerHandle] = {}
        self._changed = asyncio.Event()
        # How many jobs wait for the first worker of a kind.
        self._awaited: Counter[orchestrator_pb.WorkerKind.ValueType] = Counter()
        self._watch: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def beat(self, beat: orchestrator_pb.HeartbeatRequest) -> float:
        """Handle a heartbeat; return seconds until the next one is due.

        Raises `AlreadyExists` if a living worker has the same id or the same address.
        """
        now = self._clock()
        known = self._workers.get(beat.worker_id)
        if beat.loop_seconds > self._settings.lost_after_stall_seconds:
            # A thread reports, but the process does not answer calls.
            if known is not None and known.address == beat.address:
                self._lose(known, f"its event loop has not advanced for {beat.loop_seconds:.0f} s")
        elif known is not None and known.alive and known.address == beat.address:
            before = known.usable, known.holds
            known.beat, known.seen = beat, now
            if before != (known.usable, known.holds):
                self._notify()
        else:
            self._refuse_doubles(beat)
            worker = WorkerHandle(beat, self._client, now)
            for other in list(self._workers.values()):
                if other.address == beat.address or other.worker_id == beat.worker_id:
                    if other.alive:
                        self._replaced[other.worker_id] = worker
                    self._lose(other, "another process has taken its place")
                    self._forget(other)
            self._workers[beat.worker_id] = worker
            _log.info("worker joined", worker=str(worker), address=worker.address)
            self._notify()
        return self._settings.heartbeat_seconds

    def all(self) -> list[WorkerHandle]:
        """Return every worker known, lost ones included for a while, by id."""
        return sorted(self._workers.values(), key=lambda worker: worker.worker_id)

    def usable(self, kind: orchestrator_pb.WorkerKind.ValueType) -> list[WorkerHandle]:
        """Return the workers of a kind that take new work, by id."""
        return [worker for worker in self.all() if worker.kind == kind and worker.usable]

    def expected(self, kind: orchestrator_pb.WorkerKind.ValueType) -> list[WorkerHandle]:
        """Return the workers of a kind that take new work, and those lost a moment ago, which may
        report again or be replaced, by id."""
        return [one for one in self.all() if one.kind == kind and (one.usable or not one.alive)]

    def age(self, worker: WorkerHandle) -> float:
        """Return the seconds since the worker's newest heartbeat."""
        return self._clock() - worker.seen

    def change(self) -> Coroutine[Any, Any, object]:
        """Wait until a worker joins, leaves, drains, or reports different policies on its devices.

        Changes count from this call on, not only from when the coroutine is awaited.
        """
        return self._changed.wait()

    async def wait_for(
        self, kinds: Iterable[orchestrator_pb.WorkerKind.ValueType], deadline: Deadline
    ) -> None:
        """Wait until there is a usable worker of every kind. Raises `DeadlineExceeded`."""
        while missing := [kind for kind in kinds if not self.usable(kind)]:
            deadline.report(f"waiting for a {' and a '.join(NAMES[one] for one in missing)} worker")
            self._awaited.update(missing)
            try:
                await deadline.wait(self.change())
            finally:
                self._awaited.subtract(missing)

    def awaited(self, kind: orchestrator_pb.WorkerKind.ValueType) -> bool:
        """Return whether a job waits for the first worker of a kind."""
        return self._awaited[kind] > 0

    def start(self) -> None:
        """Start to check for missing heartbeats."""
        self._watch = asyncio.create_task(self._check_heartbeats())

    async def close(self) -> None:
        """Stop checking and close every channel."""
        if self._watch is not None:
            await cancel_all([self._watch])
        for worker in list(self._workers.values()):
            self._forget(worker)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _check_heartbeats(self) -> None:
        interval = self._settings.heartbeat_seconds / 2
        woke = self._clock()
        while True:
            await asyncio.sleep(interval)
            now = self._clock()
            # If this process itself was stopped, heartbeats are waiting unread, so count from now.
            stalled = now - woke > 2 * interval + self._settings.heartbeat_seconds
            woke = now
            for worker in list(self._workers.values()):
                if stalled and worker.alive:
                    worker.seen = now
                self._check_age(worker, now - worker.seen)

    def _refuse_doubles(self, beat: orchestrator_pb.HeartbeatRequest) -> None:
        known = self._workers.get(beat.worker_id)
        if known is not None and known.alive and known.address != beat.address:
            raise AlreadyExists(
                f"a worker of this id lives at {known.address}, this one is at {beat.address}",
                kind="worker_id_taken",
                field="worker_id",
                value=beat.worker_id,
                remedy="Give every process its own TROUPE_WORKER_ID, including one that is "
                "started again.",
            )
        self._replaced = {one: by for one, by in self._replaced.items() if by.alive}
        other = self._replaced.get(beat.worker_id)
        if other is not None and other.address == beat.address:
            # The replaced worker still reports: both would replace each other forever.
            raise AlreadyExists(
                f"{other} reports from the same address",
                kind="worker_address_taken",
                field="address",
                value=beat.address,
                remedy="Give every process a TROUPE_ADVERTISE_ADDRESS at which it is reachable.",
            )

    def _check_age(self, worker: WorkerHandle, age: float) -> None:
        # Half an interval more: the last heartbeat may be on its way.
        limit = (self._settings.lost_after_beats + 0.5) * self._settings.heartbeat_seconds
        if worker.alive and age > limit:
            self._lose(worker, f"no heartbeat for {age:.1f} s")
        elif not worker.alive and age > limit + _REMEMBER_SECONDS:
            self._forget(worker)
            self._notify()

    def _lose(self, worker: WorkerHandle, why: str) -> None:
        if not worker.alive:
            return
        worker.lose()
        _log.warning("worker lost", worker=str(worker), address=worker.address, reason=why)
        self._notify()

    def _forget(self, worker: WorkerHandle) -> None:
        del self._workers[worker.worker_id]
        task = asyncio.create_task(worker.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _notify(self) -> None:
        # Wake present waiters; later callers wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
