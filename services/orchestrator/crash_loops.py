"""Guards against crash loops: jobs that keep killing workers, or the orchestrator itself, fail.

Workers: a `CrashLoopGuard` counts the workers that died during one activity for a job. A worker may
run work of several jobs when it dies, so `SharedDeaths` finds out which job is to blame.

The orchestrator: a job that ends its process (by a library that calls `os._exit`, or by using up
the memory) would also end the next one that continues the job. `LaunchGuard` counts launches in
Redis and clears the count when the orchestrator has survived one. Jobs that were launched just
before two deaths, or that one more death would fail, are launched one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from services.orchestrator.errors import cancel_all
from services.orchestrator.placement.workers import NAMES, WorkerHandle, WorkerRegistry
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import NO_STATE, RedisAccess
from troupe.contracts import kinds
from troupe.job import LimitsSpec
from troupe.rpc import FailedPrecondition, TroupeError

# Duration of a job's turn: longer than a worker's restart, so that the worker meets one job alone.
_TURN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
# Redis hash: job id -> launches that no orchestrator is known to have survived.
_KEY: Final = "troupe:orchestrator:launches"
# The limit of a job whose specification cannot be read.
_DEFAULT_LIMIT: Final = LimitsSpec().worker_deaths
# Deaths of the orchestrator after which a job is launched separately.
_SUSPICIOUS: Final = 2
_log = structlog.get_logger(__name__)


class CrashLoopGuard:
    """A count of workers lost during one activity of a job: `doing`, for example "ran q0-s0-t1".

    `limit` (the job's `limits.worker_deaths`) lost workers fail the job, with `field` and `remedy`
    in the error.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        deaths: SharedDeaths,
        job_id: str,
        limit: int,
        doing: str,
        field: str,
        remedy: str,
    ) -> None:
        self._registry = registry
        self._deaths = deaths
        self.job_id = job_id
        self._limit = limit
        self._doing = doing
        self._field = field
        self._remedy = remedy
        self._ids: set[str] = set()
        self._kind = ""

    @property
    def suspicious(self) -> bool:
        """Whether one more death would fail the job."""
        return len(self._ids) >= max(1, self._limit - 1)

    def note(self, worker: WorkerHandle) -> None:
        """Count a lost worker unless it was draining. `check` finds out whether it is dead or was
        only unreachable."""
        if not worker.beat.draining:
            self._ids.add(worker.worker_id)
            self._kind = NAMES[worker.kind]
            self._deaths.note(self, worker.worker_id)

    def check(self) -> None:
        """Raise `FailedPrecondition` when `limit` of the counted workers are dead and at least one
        of them ran no other job's work.

        A worker that was only unreachable has come back under its own id. Call this after every
        lost worker.
        """
        if len(self._ids) < self._limit:
            return
        dead = self._ids - {one.worker_id for one in self._registry.all() if one.alive}
        if len(dead) >= self._limit and not all(self._deaths.shared(one) for one in dead):
            who = f"{len(dead)} {self._kind} workers died one after another while each"
            if len(dead) == 1:
                who = f"a {self._kind} worker died while it"
            raise FailedPrecondition(
                f"{who} {self._doing}: {', '.join(sorted(dead))}",
                kind=kinds.WORKERS_KEEP_DYING,
                field=self._field,
                remedy=self._remedy,
            )

    def clear(self) -> None:
        """Forget the counted workers after the work was done."""
        self._deaths.withdraw(self, self._ids)
        self._ids.clear()

    def excuse(self, worker_id: str) -> None:
        """Stop counting this worker, since another job was to blame."""
        self._ids.discard(worker_id)


class SharedDeaths:
    """A record of the jobs that ran work on each dead worker, for all jobs of an orchestrator.

    A death is noted once per trajectory that ran there, perhaps thousands of times, so guards are
    indexed by worker and by job.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By dead worker and job id.
        self._noted: dict[str, dict[str, set[CrashLoopGuard]]] = {}
        # Guards that would fail at one more death, by job id.
        self._suspicious: dict[str, set[CrashLoopGuard]] = {}
        # Clock time when jobs that share deaths began to take turns; None: no turns now.
        self._began: float | None = None

    def note(self, guard: CrashLoopGuard, worker_id: str) -> None:
        """Note that the worker died while it ran the work of `guard`."""
        self._noted.setdefault(worker_id, {}).setdefault(guard.job_id, set()).add(guard)
        if guard.suspicious:
            self._suspicious.setdefault(guard.job_id, set()).add(guard)

    def withdraw(self, guard: CrashLoopGuard, worker_ids: set[str]) -> None:
        """Undo `note` after the work was done."""
        for worker_id in worker_ids:
            if (jobs := self._noted.get(worker_id)) is not None:
                _discard(jobs, guard)
                if not jobs:
                    del self._noted[worker_id]
        _discard(self._suspicious, guard)

    def shared(self, worker_id: str) -> bool:
        """Return whether the worker ran work of several jobs when it died."""
        return len(self._noted.get(worker_id, ())) > 1

    def end(self, job_id: str, *, blamed: bool) -> None:
        """Forget a job that no longer uses workers. `blamed`: the deaths it shared were its fault,
        so other jobs' guards do not count them."""
        for worker_id, jobs in list(self._noted.items()):
            if jobs.pop(job_id, None) is not None and blamed:
                for guard in [one for others in jobs.values() for one in others]:
                    guard.excuse(worker_id)
                    if not guard.suspicious:
                        _discard(self._suspicious, guard)
                jobs.clear()
            if not jobs:
                del self._noted[worker_id]
        self._suspicious.pop(job_id, None)

    def may_begin(self, job_id: str) -> bool:
        """Return whether the job may begin work on a worker now.

        While one more death would fail several jobs that share deaths, they take turns of a minute,
        so that the next death identifies one of them.
        """
        sharing: set[str] = set()
        for jobs in self._noted.values():
            if len(jobs) > 1:
                sharing |= jobs.keys() & self._suspicious.keys()
        if len(sharing) < 2:
            self._began = None
            return True
        if self._began is None:
            self._began = self._clock()
        turn = int((self._clock() - self._began) / _TURN_SECONDS)
        suspects = sorted(sharing)
        return job_id not in sharing or suspects[turn % len(suspects)] == job_id

    async def turn(self, job_id: str) -> None:
        """Wait until `may_begin`."""
        while not self.may_begin(job_id):  # noqa: ASYNC110 - turns pass with time
            await asyncio.sleep(_POLL_SECONDS)


def _discard(by_job: dict[str, set[CrashLoopGuard]], guard: CrashLoopGuard) -> None:
    if (noted := by_job.get(guard.job_id)) is not None:
        noted.discard(guard)
        if not noted:
            del by_job[guard.job_id]


def death_limit(record: JobRecord) -> int:
    """Return the deaths of the orchestrator after which the job fails."""
    try:
        return record.spec().limits.worker_deaths
    except TroupeError:
        return _DEFAULT_LIMIT


def is_suspect(deaths: int, limit: int) -> bool:
    """Return whether a job must be launched alone after so many deaths of the orchestrator."""
    return deaths > 0 and deaths >= min(_SUSPICIOUS, limit - 1)


class LaunchGuard:
    """Counts, per job, launches that the orchestrator did not survive for `seconds`."""

    def __init__(self, redis: RedisAccess, seconds: float) -> None:
        self._redis = redis
        self.seconds = seconds
        self._timers: dict[str, asyncio.Task[None]] = {}

    async def deaths(self, job_id: str) -> int:
        """Return the number of consecutive orchestrators that died within `seconds` of launching
        the job."""
        return int(await self._redis.call("HGET", _KEY, job_id) or 0)

    async def begin(self, job_id: str) -> None:
        """Count a launch. Call this just before it."""
        await self._redis.call("HINCRBY", _KEY, job_id, 1)
        if (before := self._timers.pop(job_id, None)) is not None:
            before.cancel()
        self._timers[job_id] = asyncio.create_task(self._survive(job_id))

    async def clear(self, job_id: str) -> None:
        """Forget the job's counted launches."""
        await self._redis.call("HDEL", _KEY, job_id)

    async def close(self) -> None:
        """Forget launches that are still counted, since the orchestrator stops regularly."""
        timers, self._timers = self._timers, {}
        await cancel_all(timers.values())
        try:
            async with asyncio.timeout(1):
                for job_id in timers:
                    await self.clear(job_id)
        except (*NO_STATE, TimeoutError) as error:
            _log.warning("launches stay counted", error=str(error))

    async def _survive(self, job_id: str) -> None:
        await asyncio.sleep(self.seconds)
        try:
            await self.clear(job_id)
        except NO_STATE as error:
            _log.warning("a launch stays counted", job_id=job_id, error=str(error))
        del self._timers[job_id]
