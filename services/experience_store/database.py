"""Scripts and commands in Redis, and what a failure of Redis means to a caller."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from redis import exceptions

from services.experience_store.connection import CLUSTER_SCHEMES, Heard, connect_to
from services.experience_store.resp import Command
from services.experience_store.scripts import load_scripts
from troupe.rpc import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)

log = structlog.get_logger(__name__)

# Short: whoever called repeats too, and must learn soon that Redis is away.
RETRIES: Final = RetryPolicy(max_attempts=3, initial_backoff=0.05, max_backoff=0.5)
# At start nobody waits for an answer: look again soon, but not in a tight loop.
START_BACKOFF: Final = RetryPolicy(initial_backoff=0.1, max_backoff=2.0)
# Streams, effect replication of scripts that read the clock, and UNLINK are all there from here on.
OLDEST_VERSION: Final = (6, 2)
# Redis does one thing at a time: a burst of hundreds of appends waits here, not in its sockets.
MAX_CONNECTIONS: Final = 32

# TimeoutError is an OSError; a cluster's client has errors that are no RedisError.
_FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_UNREACHABLE: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.RedisClusterException,
    OSError,
)
# A replica, a primary without its replicas, a full disk.
_NO_WRITES: Final = (exceptions.ReadOnlyError, exceptions.ClusterDownError)
_NO_WRITES_WORDS: Final = ("MISCONF", "READONLY", "read only replica", "NOREPLICAS", "BUSY ")


@dataclass(frozen=True)
class Call:
    """One script on one job's or policy's keys (`base`), with its arguments."""

    script: str
    base: str
    args: Sequence[str | bytes | int]
    before: Sequence[Command] = ()
    """Commands that are sent just ahead of it, on keys of the same slot."""


class Database:
    """Runs scripts and commands; raises `Unavailable` naming the address when Redis is away."""

    def __init__(self, url: str, *, timeout: float = 5.0, retries: RetryPolicy = RETRIES) -> None:
        self.address = _shown(url)
        self.clustered = urlsplit(url).scheme in CLUSTER_SCHEMES
        self._timeout = timeout
        self._retries = retries
        self._scripts = load_scripts()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self.problem: str | None = None
        """Why Redis cannot be had, while `wait_ready` waits for it."""
        try:
            self._connection = connect_to(url, timeout)
        except ValueError as error:
            raise FailedPrecondition(
                f"not a Redis URL: {error}",
                kind="redis_url",
                field="redis_url",
                value=self.address,
                remedy="Set TROUPE_REDIS_URL, for example redis://127.0.0.1:6379/0.",
            ) from error

    async def run(self, script: str, base: str, *args: str | bytes | int) -> list[Any]:
        """The reply of one script."""
        return (await self.run_each([Call(script, base, args)]))[0]

    async def run_each(self, calls: Sequence[Call]) -> list[list[Any]]:
        """The replies of several scripts, sent together. Each is atomic, together they are not."""
        commands: list[Command] = []
        places: list[int] = []
        for call in calls:
            commands += call.before
            places.append(len(commands))
            commands.append(self._command(call))
        replies = await self.execute_each(commands, missing_scripts=calls)
        return [list(replies[place]) for place in places]

    async def run_all(self, before: Sequence[Command], calls: Sequence[Call]) -> list[list[Any]]:
        """The replies of several scripts, sent together behind commands on any of their keys: only
        where one server has them all."""
        commands = [*before, *map(self._command, calls)]
        replies = await self.execute_each(commands, missing_scripts=calls)
        return [list(reply) for reply in replies[len(before) :]]

    def _command(self, call: Call) -> Command:
        return ("EVALSHA", self._scripts[call.script].sha, 1, call.base, *call.args)

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """The reply of one command."""
        return (await self.execute_each([command]))[0]

    async def execute_each(
        self,
        commands: Sequence[Command],
        *,
        missing_scripts: Sequence[Call] = (),
    ) -> list[Any]:
        """The replies of several commands sent together; raises the first error among them."""
        if not commands:
            return []

        async def attempt(_left: float | None) -> list[Any]:
            try:
                replies = await self._send(commands)
                if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    # Redis was restarted or flushed its scripts; all of them are repeatable.
                    names = {call.script for call in missing_scripts}
                    async with asyncio.timeout(self._timeout):
                        await self._connection.load(self._scripts[name].text for name in names)
                    replies = await self._send(commands)
            except _FAILURES as error:
                raise self._typed(error) from error
            for reply in replies:
                if isinstance(reply, Exception):
                    raise self._typed(reply) from reply
            return replies

        try:
            return await attempt(None)
        except Unavailable:
            return await self._retries.run(attempt, self._timeout)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        async with self._slots, asyncio.timeout(self._timeout):
            return await self._connection.send(commands)

    async def wait_ready(self) -> dict[str, str]:
        """Wait, without end, until Redis answers; returns what it says about itself.

        The service is NOT_SERVING meanwhile. Raises `FailedPrecondition` when the server is too
        old, or wants other credentials: waiting would not help.
        """
        attempt, rng = 0, random.Random()
        self.problem = f"it waits for Redis at {self.address}"
        while True:
            attempt += 1
            try:
                info = await self._introduce()
                self.problem = None
                return info
            except Unavailable as error:
                self.problem = str(error)
                # Each of the first few attempts, then about twice a minute.
                if attempt <= 3 or attempt % 16 == 0:
                    log.warning("waiting_for_redis", attempt=attempt, error=str(error))
                await asyncio.sleep(START_BACKOFF.backoff(min(attempt, 16), error, rng))

    async def _introduce(self) -> dict[str, str]:
        info = await self.info()
        version = info["redis_version"]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
            raise FailedPrecondition(
                f"Redis at {self.address} is too old",
                kind="redis_version",
                field="redis_version",
                value=version,
                remedy="Run Redis 6.2 or newer.",
            )
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.load(script.text for script in self._scripts.values())
        except _FAILURES as error:
            raise self._typed(error) from error
        return info

    async def info(self) -> dict[str, str]:
        """What Redis says about itself, by name."""

        async def attempt(_left: float | None) -> dict[str, str]:
            try:
                async with self._slots, asyncio.timeout(self._timeout):
                    return await self._connection.info()
            except _FAILURES as error:
                raise self._typed(error) from error

        try:
            return await attempt(None)
        except Unavailable:
            return await self._retries.run(attempt, self._timeout)

    def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """What is published on channels like `pattern`, for ever, on a connection of its own; None
        once the listening has begun. Raises what redis-py raises when Redis is away.
        """
        return self._connection.listen(pattern)

    async def close(self) -> None:
        """Give all connections back."""
        await self._connection.close()

    def _typed(self, error: Exception) -> TroupeError:
        text = str(error)
        if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
            return FailedPrecondition(
                f"Redis at {self.address} refuses us: {text}",
                kind="redis_refuses",
                field="redis_url",
                value=self.address,
                remedy="Put the user and password into TROUPE_REDIS_URL.",
            )
        if isinstance(error, exceptions.MovedError | exceptions.AskError) or (
            "cluster mode is not enabled" in text.lower()
        ):
            found, wanted = ("a node of a cluster", "redis-cluster://")
            if self.clustered:
                found, wanted = ("no Redis Cluster", "redis://")
            return FailedPrecondition(
                f"Redis at {self.address} is {found}",
                kind="redis_url",
                field="redis_url",
                value=self.address,
                remedy=f"Begin TROUPE_STORE_REDIS_URL with {wanted}.",
            )
        if isinstance(error, _UNREACHABLE):
            # `redis.ConnectionError: Error 111 connecting to ...` and the like.
            return Unavailable(
                f"Redis at {self.address} does not answer: {text or type(error).__name__}",
                kind="redis_unavailable",
                field="redis_url",
                value=self.address,
                remedy="Start Redis there, or set TROUPE_REDIS_URL to where it runs.",
            )
        # Inside a script the error has another class, and up to Redis 6 another code.
        if isinstance(error, exceptions.OutOfMemoryError) or "'maxmemory'" in text:
            return ResourceExhausted(
                f"Redis at {self.address} is at its memory limit",
                kind="redis_full",
                field="maxmemory",
                remedy="Raise maxmemory, or train on fewer trajectories per step.",
                retry_after_ms=2000,
            )
        if isinstance(error, _NO_WRITES) or any(word in text for word in _NO_WRITES_WORDS):
            return Unavailable(
                f"Redis at {self.address} takes no writes now: {text}",
                kind="redis_unavailable",
                field="redis_url",
                value=self.address,
                remedy="Free its disk, or point TROUPE_REDIS_URL at the primary.",
            )
        return Internal(f"Redis at {self.address}: {text}", kind="redis_error")


def _shown(url: str) -> str:
    """`url` as it may be shown: without user and password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.scheme in CLUSTER_SCHEMES:
        return parts.netloc.rpartition("@")[2]
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path.rstrip('/')}"
