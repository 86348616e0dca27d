"""Where the state of quotas is: in Redis for all reward services together, else in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, Protocol

from troupe.rpc import Internal, Unavailable
from troupe.scheduling.elastic.quota import Answer, Bucket, Limits

_PREFIX: Final = "troupe:quota"
_TIMEOUT: Final = 5.0


class Buckets(Protocol):
    """One bucket per quota, by name. `holder` names this process among all that share them."""

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> Answer:
        """`Bucket.ask`. Raises `Unavailable`."""

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`Bucket.give_back`. Raises `Unavailable`."""

    async def shut(self, name: str, seconds: float) -> None:
        """Nobody gets anything for so long. Raises `Unavailable`."""

    async def close(self) -> None:
        """Let go of connections."""


class LocalBuckets:
    """Shared with nobody."""

    kind = "process"

    def __init__(self, quotas: Mapping[str, Limits]) -> None:
        now = time.monotonic()
        self._buckets = {name: Bucket(limits, now) for name, limits in quotas.items()}

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> Answer:
        """`Bucket.ask`; nobody else can hold anything, so nothing is ever forgotten."""
        return self._buckets[name].ask("", wishes, time.monotonic(), float("inf"))

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`Bucket.give_back`."""
        self._buckets[name].give_back("", units, time.monotonic(), unused=unused)

    async def shut(self, name: str, seconds: float) -> None:
        """`Bucket.shut`."""
        now = time.monotonic()
        self._buckets[name].shut(now + seconds, now)

    async def close(self) -> None:
        """Nothing to let go of."""


class RedisBuckets:
    """Shared with whoever uses the same Redis; each call is one atomic script."""

    kind = "redis"

    def __init__(self, url: str, quotas: Mapping[str, Limits], holder: str) -> None:
        # Only a service with quotas needs the package.
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._quotas, self._holder = quotas, holder
        self._client = Redis.from_url(
            url,
            # The feed asks again by itself.
            retry=Retry(NoBackoff(), 0),
            # redis-py's own timeouts may swallow a cancellation under Python 3.11.
            socket_timeout=None,
            socket_connect_timeout=None,
            client_name="troupe-reward",
        )
        text = files(__package__).joinpath("quota.lua").read_text(encoding="utf-8")
        self._script: Any = self._client.register_script(text)

    async def ping(self) -> None:
        """Raise `Unavailable` unless Redis answers."""
        await self._guarded(self._client.ping())

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> Answer:
        """`Bucket.ask`, by Redis' clock."""
        granted, wait = await self._run(name, "ask", patience, *wishes)
        seconds = float(wait)
        return Answer(int(granted), seconds if seconds >= 0 else float("inf"))

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`Bucket.give_back`."""
        await self._run(name, "give_back", 0, units, unused)

    async def shut(self, name: str, seconds: float) -> None:
        """`Bucket.shut`."""
        await self._run(name, "shut", 0, seconds)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _run(
        self, name: str, what: str, patience: float, *values: float, now: float | str = ""
    ) -> Any:
        limits = self._quotas[name]
        bounds = (limits.rate, limits.burst, limits.concurrency)
        args = (what, self._holder, *bounds, patience, now, *values)
        return await self._guarded(self._script(keys=[f"{_PREFIX}:{{{name}}}"], args=args))

    async def _guarded(self, call: Any) -> Any:
        from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

        try:
            async with asyncio.timeout(_TIMEOUT):
                return await call
        except ResponseError as error:
            raise Internal(f"Redis refuses a command: {error}", kind="redis_error") from error
        except (ConnectionError, TimeoutError, RedisError, OSError) as error:
            raise Unavailable(
                f"the quotas' Redis does not answer: {error}",
                kind="redis_unavailable",
                field="TROUPE_REDIS_URL",
                remedy="Start it; calls that need a quota go on when it is back.",
            ) from error
