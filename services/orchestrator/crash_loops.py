"""Jobs whose launch ends the orchestrator: found, and set aside.

What ends the process (a library that calls `os._exit`, memory that runs out) ends it again as soon
as the next orchestrator goes on with the job, and with it every other job. So launches are counted
in Redis, and the count goes when the orchestrator has survived one. A death says nothing of which
of the jobs launched together was at fault: those that were launched just before two deaths, or that
one more would fail, are launched one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from services.orchestrator.placement.workers import NAMES, WorkerHandle, WorkerRegistry
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import RedisAccess, StateUnavailable
from troupe.job import LimitsSpec
from troupe.rpc import FailedPrecondition, TroupeError

# Longer than a worker takes to come back, so that it meets one job alone.
_TURN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5


class CrashLoopGuard:
    """Workers that broke off while a job did `doing` ("ran q0-s0-t1"); `limit` of them are too many
    (the job's `limits.worker_deaths`)."""

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
        """Whether one more death would be too many."""
        return len(self._ids) >= max(1, self._limit - 1)

    def note(self, worker: WorkerHandle) -> None:
        """`worker` broke off; what it is, dead or out of reach, time will tell. See `check`.

        One that drains ends on purpose.
        """
        if not worker.beat.draining:
            self._ids.add(worker.worker_id)
            self._kind = NAMES[worker.kind]
            self._deaths.note(self, worker.worker_id)

    def check(self) -> None:
        """Raise `FailedPrecondition` when too many of those that broke off are dead by now, and at
        least one of them took no other job's work along.

        To be asked again when a worker was lost. One that was only out of reach is back under its
        own id.
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
                kind="workers_keep_dying",
                field=self._field,
                remedy=self._remedy,
            )

    def clear(self) -> None:
        """The work was done: the next death is another matter."""
        self._deaths.withdraw(self, self._ids)
        self._ids.clear()

    def excuse(self, worker_id: str) -> None:
        """This death was another job's fault."""
        self._ids.discard(worker_id)


class SharedDeaths:
    """Which jobs had work on the workers that died, over all jobs of an orchestrator.

    A worker's death is noted once for each thing that it took along, thousands of trajectories
    maybe: what is asked often is kept by job.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By dead worker and job.
        self._noted: dict[str, dict[str, set[CrashLoopGuard]]] = {}
        # By job: what one more death would be too many for.
        self._suspicious: dict[str, set[CrashLoopGuard]] = {}
        # When the jobs that share deaths began to take turns.
        self._began: float | None = None

    def note(self, victims: CrashLoopGuard, worker_id: str) -> None:
        """Note that the worker took work of this job along."""
        self._noted.setdefault(worker_id, {}).setdefault(victims.job_id, set()).add(victims)
        if victims.suspicious:
            self._suspicious.setdefault(victims.job_id, set()).add(victims)

    def withdraw(self, victims: CrashLoopGuard, worker_ids: set[str]) -> None:
        """Take back that these deaths took this work along: it was done since."""
        for worker_id in worker_ids:
            if (jobs := self._noted.get(worker_id)) is not None:
                _discard(jobs, victims)
                if not jobs:
                    del self._noted[worker_id]
        _discard(self._suspicious, victims)

    def shared(self, worker_id: str) -> bool:
        """Whether the death took work of several jobs along."""
        return len(self._noted.get(worker_id, ())) > 1

    def end(self, job_id: str, *, blamed: bool) -> None:
        """The job has left the workers. `blamed`: its deaths were its fault, and no other job's."""
        for worker_id, jobs in list(self._noted.items()):
            if jobs.pop(job_id, None) is not None and blamed:
                for victims in [one for others in jobs.values() for one in others]:
                    victims.excuse(worker_id)
                    if not victims.suspicious:
                        _discard(self._suspicious, victims)
                jobs.clear()
            if not jobs:
                del self._noted[worker_id]
        self._suspicious.pop(job_id, None)

    def may_begin(self, job_id: str) -> bool:
        """Whether the job may begin work on a worker now. Jobs take turns of a minute while one
        more death would be too many for several that share deaths."""
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
        """Return when the job may begin work on a worker."""
        while not self.may_begin(job_id):  # noqa: ASYNC110 - turns pass with time
            await asyncio.sleep(_POLL_SECONDS)


def _discard(by_job: dict[str, set[CrashLoopGuard]], victims: CrashLoopGuard) -> None:
    if (noted := by_job.get(victims.job_id)) is not None:
        noted.discard(victims)
        if not noted:
            del by_job[victims.job_id]


_log = structlog.get_logger(__name__)
# Hash: launches of a job that no orchestrator is known to have survived.
_KEY: Final = "troupe:orchestrator:launches"


# Of a job whose specification cannot be read: the default.
_LIMIT: Final = LimitsSpec().worker_deaths
# So many deaths say that one of those launched together is at fault.
_SUSPICIOUS: Final = 2


def limit_of(record: JobRecord) -> int:
    """Deaths after which a job is set aside."""
    try:
        return record.spec().limits.worker_deaths
    except TroupeError:
        return _LIMIT


def is_suspect(deaths: int, limit: int) -> bool:
    """Whether a job is to be launched apart from others."""
    return deaths > 0 and deaths >= min(_SUSPICIOUS, limit - 1)


class LaunchGuard:
    """Counts launches that the orchestrator did not survive for `seconds`; as many as the job's
    `limits.worker_deaths` are too many."""

    def __init__(self, redis: RedisAccess, seconds: float) -> None:
        self._redis = redis
        self.seconds = seconds
        self._timers: dict[str, asyncio.Task[None]] = {}

    async def deaths(self, job_id: str) -> int:
        """Orchestrators that died just after they had launched the job, one after another."""
        return int(await self._redis.call("HGET", _KEY, job_id) or 0)

    async def begin(self, job_id: str) -> None:
        """The job is about to be launched."""
        await self._redis.call("HINCRBY", _KEY, job_id, 1)
        if (before := self._timers.pop(job_id, None)) is not None:
            before.cancel()
        self._timers[job_id] = asyncio.create_task(self._survive(job_id))

    async def clear(self, job_id: str) -> None:
        """Forgets the launches of the job that were counted so far."""
        await self._redis.call("HDEL", _KEY, job_id)

    async def close(self) -> None:
        """The orchestrator stops in order: nothing has ended it."""
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()
        await asyncio.gather(*timers.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(1):
                for job_id in timers:
                    await self.clear(job_id)
        except (StateUnavailable, TimeoutError) as error:
            _log.warning("launches stay counted", error=str(error))

    async def _survive(self, job_id: str) -> None:
        await asyncio.sleep(self.seconds)
        try:
            await self.clear(job_id)
        except StateUnavailable as error:
            _log.warning("a launch stays counted", job_id=job_id, error=str(error))
        del self._timers[job_id]
