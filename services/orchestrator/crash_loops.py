"""Jobs whose launch ends the orchestrator: found, and set aside.

What ends the process (a library that calls `os._exit`, memory that runs out) ends it again as soon
as the next orchestrator goes on with the job, and with it every other job. So launches are counted
in Redis, and the count goes when the orchestrator has survived one. A death says nothing of which
of the jobs launched together was at fault: those that were launched just before two deaths, or that
one more would fail, are launched one at a time.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from services.orchestrator.records import JobRecord
from services.orchestrator.redis_access import RedisAccess, RedisUnavailable
from troupe.job import LimitsSpec
from troupe.rpc import TroupeError

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


class CrashLoopGuard:
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
        except (RedisUnavailable, TimeoutError) as error:
            _log.warning("launches stay counted", error=str(error))

    async def _survive(self, job_id: str) -> None:
        await asyncio.sleep(self.seconds)
        try:
            await self.clear(job_id)
        except RedisUnavailable as error:
            _log.warning("a launch stays counted", job_id=job_id, error=str(error))
        del self._timers[job_id]
