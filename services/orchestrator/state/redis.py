"""The orchestrator's Redis: one connection pool, the names of keys, the Lua scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from troupe.disks import shortage
from troupe.rpc import Internal, RetryPolicy, TroupeError, Unavailable

_PREFIX: Final = "troupe:orchestrator"
_LUA: Final = Path(__file__).parent / "lua"
_RETRY: Final = RetryPolicy(max_attempts=1000, initial_backoff=0.05, max_backoff=1.0)
_TIMEOUT: Final = 10.0
# States of a Redis that pass: full, loading its data, a replica, unable to write its log.
_PASSING: Final = (OutOfMemoryError, ReadOnlyError, MasterDownError)
_OTHER_TYPE: Final = "WRONGTYPE"
_PASSING_CODES: Final = ("MISCONF", "BUSY", "NOREPLICAS")

# Sorted set: ids of all jobs by when they were created.
INDEX: Final = f"{_PREFIX}:jobs"
# Set: ids of jobs of which hosts may hold published weights.
STATES: Final = f"{_PREFIX}:jobs:states"
# Kept apart, so that training does not push evaluations and matches out.
TRAJECTORY_KINDS: Final = ("train", "evaluate", "match")
Value = str | bytes | int | float


class StateUnavailable(Unavailable):
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

    @property
    def population(self) -> str:
        """Hash: pools, payoffs, meta-strategies; what the slots have."""
        return self._key("population")

    @property
    def matches(self) -> tuple[str, str]:
        """Matches of the population: order (list), how they ended (hash)."""
        return self._key("matches:order"), self._key("matches")

    @property
    def answers(self) -> str:
        """Hash: what members answer in every information state of a game, by pool and member."""
        return self._key("population:answers")

    @property
    def all(self) -> list[str]:
        """Every key that a job may have."""
        return [
            self.record,
            self.events,
            self.ledger,
            self.versions,
            self.rows,
            self.latest,
            self.population,
            *self.matches,
            self.answers,
            *(key for kind in TRAJECTORY_KINDS for key in self.trajectories(kind)),
        ]

    def trajectories(self, kind: str) -> tuple[str, str, str]:
        """Recent trajectories of a kind: order (list), summaries and full ones (hashes)."""
        base = f"trajectories:{kind}"
        return self._key(base), self._key(f"{base}:summaries"), self._key(f"{base}:full")


def _shown(url: str) -> str:
    """The URL as logs and errors may show it: without a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class RedisAccess:
    """Runs commands and scripts; what fails says which Redis and what to do.

    A Redis that is away is asked again for `patience` seconds: one that restarts is back by then.
    All scripts, and all commands used here, may be sent twice.
    """

    def __init__(self, url: str, *, patience: float = 20.0, disk: Path | None = None) -> None:
        """`disk`: the directory of a Redis on this machine, which stands still without room."""
        self.address = _shown(url)
        self._disk = disk
        self._patience = patience
        # Repeating is the business of troupe.rpc.RetryPolicy.
        self._client = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            # Not redis-py's own timeout: under Python 3.11 its `wait_for` may swallow a
            # cancellation, and a runner that was told to stop would go on.
            socket_timeout=None,
            socket_connect_timeout=None,
            client_name="troupe-orchestrator",
        )
        self._scripts: dict[str, Any] = {
            path.stem: self._client.register_script(path.read_text(encoding="utf-8"))
            for path in _LUA.glob("*.lua")
        }
        # redis-py leaves it untyped.
        self._execute: Any = self._client.execute_command

    async def ping(self) -> None:
        """Raise `StateUnavailable` unless Redis answers."""
        await self.call("PING")

    async def call(self, *command: Value) -> Any:
        """The reply of one command. Text is bytes."""
        return await self._repeat(lambda: self._execute(*command))

    async def call_each(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """The replies of several commands, which travel together; not atomic. Where a key holds
        what its command is not for, its reply is the error that says so."""

        async def send() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not str(reply).startswith(_OTHER_TYPE):
                    raise reply
            return replies

        return await self._repeat(send) if commands else []

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """The reply of one script of `lua/`, atomically."""
        return await self._repeat(lambda: self._scripts[script](keys=keys, args=args))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _repeat(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async def attempt(_left: float | None) -> Any:
            try:
                async with asyncio.timeout(_TIMEOUT):
                    return await call()
            except (RedisError, OSError) as error:
                full = None if self._disk is None else await asyncio.to_thread(shortage, self._disk)
                raise self._typed(error, full) from error

        return await _RETRY.run(attempt, self._patience)

    def _typed(self, error: Exception, full: str | None) -> TroupeError:
        text = str(error) or f"no answer within {_TIMEOUT:g} s"
        passing = isinstance(error, _PASSING) or text.startswith(_PASSING_CODES)
        if isinstance(error, ResponseError) and not passing:
            return Internal(f"Redis refuses a command: {text}", kind="redis_error")
        if full is not None:
            return StateUnavailable(
                f"Redis does not do its work ({text}): {full}",
                field="data_dir",
                value=self._disk,
                remedy="Free space there; jobs continue by themselves then.",
            )
        return StateUnavailable(
            f"Redis does not do its work: {text}",
            field="redis_url",
            value=self.address,
            remedy="Start Redis there or set TROUPE_REDIS_URL; jobs continue when it is back.",
        )
