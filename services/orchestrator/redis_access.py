"""The orchestrator's Redis: one connection pool, the names of keys, the Lua scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from troupe.rpc import Unavailable

_PREFIX: Final = "troupe:orchestrator"
_LUA: Final = Path(__file__).parent / "lua"
# A Redis that restarts is back within seconds: about 20 s of patience, then the call fails.
_RETRIES: Final = 12
_BACKOFF_CAP: Final = 2.0
_TIMEOUT: Final = 10.0

INDEX: Final = f"{_PREFIX}:jobs"
Value = str | bytes | int | float


class RedisUnavailable(Unavailable):
    """The orchestrator's memory is away: nothing can be decided or recorded until it is back."""

    default_kind = "redis_unavailable"


@dataclass(frozen=True)
class JobKeys:
    """Names of one job's keys; the braces keep them in one slot of a Redis Cluster."""

    job_id: str

    def _key(self, name: str) -> str:
        return f"{_PREFIX}:{{{self.job_id}}}:{name}"

    @property
    def record(self) -> str:
        """Hash: the job record."""
        return self._key("record")

    @property
    def events(self) -> str:
        """Stream: the event log."""
        return self._key("events")

    @property
    def ledger(self) -> str:
        """Hash: per policy `:done` steps, newest `:entry`, and a checksum per `:v<version>`."""
        return self._key("ledger")

    @property
    def versions(self) -> str:
        """List: every entry that the ledger ever held."""
        return self._key("versions")

    @property
    def rows(self) -> str:
        """List: measured values, as `MetricsLogged` messages in the order they were logged."""
        return self._key("rows")

    @property
    def latest(self) -> str:
        """Hash: newest value of every metric."""
        return self._key("latest")

    def trajectories(self, kind: str) -> tuple[str, str, str]:
        """Recent trajectories of a kind: order (list), summaries and full ones (hashes)."""
        base = f"trajectories:{kind}"
        return self._key(base), self._key(f"{base}:summaries"), self._key(f"{base}:full")


def _shown(url: str) -> str:
    """The URL as logs and errors may show it: without a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class RedisAccess:
    """Runs commands and scripts; what fails says which Redis and what to do."""

    def __init__(self, url: str) -> None:
        self.address = _shown(url)
        self.client = Redis.from_url(
            url,
            retry=Retry(ExponentialBackoff(cap=_BACKOFF_CAP, base=0.05), _RETRIES),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
        )
        self._scripts: dict[str, Any] = {
            path.stem: self.client.register_script(path.read_text(encoding="utf-8"))
            for path in _LUA.glob("*.lua")
        }
        # redis-py leaves it untyped.
        self._execute: Any = self.client.execute_command

    async def ping(self) -> None:
        """Raise `Unavailable` unless Redis answers."""
        await self.call("PING")

    async def call(self, *command: Value) -> Any:
        """One command. Replies are bytes."""
        try:
            return await self._execute(*command)
        except RedisError as error:
            raise self._explain(error) from error

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """One script of `lua/`, atomically."""
        try:
            return await self._scripts[script](keys=keys, args=args)
        except RedisError as error:
            raise self._explain(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    def _explain(self, error: RedisError) -> RedisUnavailable:
        return RedisUnavailable(
            f"Redis does not do its work: {error or type(error).__name__}",
            field="redis_url",
            value=self.address,
            remedy="Start Redis there or set TROUPE_REDIS_URL; jobs continue when it is back.",
        )
