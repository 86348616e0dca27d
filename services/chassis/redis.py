"""Redis client of the services that keep state in Redis: retries, Lua scripts, typed errors.

`RedisClient` sends commands and Lua scripts to one server or to a Redis Cluster. All of them must
be idempotent: a command that fails because Redis is unreachable, temporarily full or restarting is
sent again. An error says which Redis failed and what to do about it; its text never contains the
password of the URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import structlog
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from troupe.disks import shortage
from troupe.rpc import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)
from troupe.rpc.addresses import split_address

log = structlog.get_logger(__name__)

Value: TypeAlias = str | bytes | memoryview | int | float
Command: TypeAlias = Sequence[Value]
# Channel and message of a subscription; None when the subscription has begun.
Published: TypeAlias = tuple[bytes, bytes] | None

CLUSTER_SCHEMES: Final = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
# Oldest Redis version with streams, effect replication of scripts that read the clock, and UNLINK.
OLDEST_VERSION: Final = (6, 2)
# A cluster client learns which node serves a slot from redirections (MOVED).
_CLUSTER_TRIES: Final = 3
# Connections at most. Redis executes one command at a time, so a burst may as well queue here.
_MAX_CONNECTIONS: Final = 32
# Read timeout of a subscription, which is silent while nothing is published.
_LISTEN_SECONDS: Final = 1.0
# Seconds between two attempts to reach Redis when the service starts.
_START_BACKOFF: Final = RetryPolicy(initial_backoff=0.1, max_backoff=2.0)

# TimeoutError is an OSError; the cluster client also raises errors that are not RedisErrors.
FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_UNREACHABLE: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.RedisClusterException,
    OSError,
)
# Error codes of a replica, of a primary without enough replicas, and of a full disk.
_NO_WRITES: Final = (
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
)
_NO_WRITES_WORDS: Final = ("MISCONF", "READONLY", "read only replica", "NOREPLICAS", "BUSY ")
_OTHER_TYPE: Final = "WRONGTYPE"


class KeyName:
    """The name of a key, as an attribute: `name` behind the `base` of its object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> str:
        return f"{owner.base}:{self._name}"


@dataclass(frozen=True)
class Script:
    """A Lua script with its digest: one atomic write, or a consistent read."""

    text: str
    sha: str
    """The digest that EVALSHA takes."""

    @staticmethod
    def of(text: str) -> Script:
        """The script `text` with its digest."""
        return Script(text, hashlib.sha1(text.encode()).hexdigest())


class RedisClient:
    """Client that runs commands and scripts on one Redis, and retries while it is unreachable."""

    unavailable: ClassVar[type[Unavailable]] = Unavailable
    """The error of a Redis that does not answer, or takes no writes for now."""

    def __init__(
        self,
        url: str,
        scripts: Mapping[str, str],
        *,
        name: str,
        retries: RetryPolicy,
        timeout: float,
        patience: float,
        disk: Path | None = None,
    ) -> None:
        """`scripts`: Lua texts by name. `name`: the client's name in Redis (CLIENT SETNAME).

        One attempt takes at most `timeout` seconds; retries by `retries` end after `patience`
        seconds. `disk`: the data directory of a Redis on this machine, to report a full disk.
        Raises `FailedPrecondition` for an invalid URL.
        """
        self.address = shown(url)
        self.clustered = urlsplit(url).scheme in CLUSTER_SCHEMES
        self.problem: str | None = None
        """Why Redis cannot be reached, while `wait_ready` waits for it."""
        self._retries = retries
        self._timeout = timeout
        self._patience = patience
        self._disk = disk
        self._scripts = {script: Script.of(text) for script, text in scripts.items()}
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)
        options: dict[str, Any] = {
            # The caller bounds each attempt: redis-py's own timeout (asyncio.wait_for) swallows
            # cancellations on Python 3.11, and makes a task of every write.
            "socket_timeout": None,
            "socket_connect_timeout": timeout,
            "protocol": 2,
            "client_name": name,
        }
        try:
            self._redis: Any = _cluster(url, options) if self.clustered else _server(url, options)
        except ValueError as error:
            raise FailedPrecondition(
                f"not a Redis URL: {error}",
                kind="redis_url",
                field="redis_url",
                value=self.address,
                remedy="Set TROUPE_REDIS_URL, for example redis://127.0.0.1:6379/0.",
            ) from error

    async def call(self, *command: Value) -> Any:
        """The reply to one command: text as bytes, HGETALL as a dictionary, as in redis-py."""
        return (await self.call_each([command]))[0]

    async def call_each(
        self, commands: Sequence[Command], *, keep_mistyped: bool = False
    ) -> list[Any]:
        """The replies to commands that are sent as one pipeline, which is not atomic.

        Raises the first error among them. `keep_mistyped`: a WRONGTYPE error is returned as the
        reply of its command instead.
        """
        if not commands:
            return []

        async def attempt(_left: float | None) -> list[Any]:
            try:
                replies = await self._send(commands)
                if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    # Redis was restarted, or its scripts were flushed.
                    await self._load_scripts()
                    replies = await self._send(commands)
            except FAILURES as error:
                raise await self._failure(error) from error
            for reply in replies:
                if isinstance(reply, Exception) and not (
                    keep_mistyped and str(reply).startswith(_OTHER_TYPE)
                ):
                    raise await self._failure(reply) from reply
            return replies

        try:
            return await attempt(None)
        except Unavailable:
            return await self._retries.run(attempt, self._patience)

    async def run_script(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """The reply of one script."""
        return await self.call(*self.script_command(script, keys, args))

    def script_command(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Command:
        """The command that runs a script, to be sent with others (`call_each`)."""
        return ("EVALSHA", self._scripts[script].sha, len(keys), *keys, *args)

    async def ping(self) -> None:
        """Raise `unavailable` unless Redis answers."""
        await self.call("PING")

    async def info(self) -> dict[str, str]:
        """The fields of INFO. Of a cluster: memory of all primaries together, oldest version."""

        async def attempt(_left: float | None) -> dict[str, str]:
            try:
                async with self._slots, asyncio.timeout(self._timeout):
                    if not self.clustered:
                        return _texts(await self._redis.execute_command("INFO"))
                    replies = await self._redis.execute_command(
                        "INFO", target_nodes=RedisCluster.PRIMARIES
                    )
                    return _added([_texts(reply) for reply in replies.values()])
            except FAILURES as error:
                raise await self._failure(error) from error

        try:
            return await attempt(None)
        except Unavailable:
            return await self._retries.run(attempt, self._patience)

    async def wait_ready(self) -> dict[str, str]:
        """Wait without a time limit until Redis answers; returns its INFO.

        The service is NOT_SERVING meanwhile. Raises `FailedPrecondition` if the server is too old
        or refuses the credentials, since waiting would not help.
        """
        attempt, rng = 0, random.Random()
        self.problem = f"it waits for Redis at {self.address}"
        while True:
            attempt += 1
            try:
                info = await self._check_server()
                self.problem = None
                return info
            except Unavailable as error:
                self.problem = str(error)
                # Log each of the first few attempts, then about two a minute.
                if attempt <= 3 or attempt % 16 == 0:
                    log.warning("waiting_for_redis", attempt=attempt, error=str(error))
                await asyncio.sleep(_START_BACKOFF.backoff(min(attempt, 16), error, rng))

    async def listen(self, pattern: str) -> AsyncGenerator[Published, None]:
        """Stream the messages on channels that match `pattern`, on a connection of its own.

        Yields None first, once the subscription has begun. Raises redis-py's errors if Redis is
        unreachable.
        """
        pubsub = self._redis.pubsub()
        try:
            await pubsub.psubscribe(pattern)
            while True:
                message = await pubsub.get_message(timeout=_LISTEN_SECONDS)
                if message is None:
                    continue
                if message["type"] == "pmessage":
                    yield message["channel"], message["data"]
                elif message["type"] == "psubscribe":
                    yield None
        finally:
            # The connection is in an unknown state after a cancelled read: never reuse it.
            with contextlib.suppress(exceptions.RedisError, OSError):
                await pubsub.aclose()

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to a pipeline; an error reply is returned as an exception."""
        async with self._slots, asyncio.timeout(self._timeout):
            return await self._exchange(commands)

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await self._redis.execute_command(*commands[0])]
            except exceptions.ResponseError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute(raise_on_error=False))

    async def _load_scripts(self) -> None:
        """Load the scripts into every server (SCRIPT LOAD)."""
        targets = {"target_nodes": RedisCluster.PRIMARIES} if self.clustered else {}
        async with asyncio.timeout(self._timeout):
            for script in self._scripts.values():
                await self._redis.execute_command("SCRIPT LOAD", script.text, **targets)

    async def _check_server(self) -> dict[str, str]:
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
            await self._load_scripts()
        except FAILURES as error:
            raise await self._failure(error) from error
        return info

    async def _failure(self, error: Exception) -> TroupeError:
        """The typed error for an exception of redis-py."""
        found = self._typed(error)
        if self._disk is None or not isinstance(found, Unavailable):
            return found
        full = await asyncio.to_thread(shortage, self._disk)
        if full is None:
            return found
        return self.unavailable(
            f"{found.message}: {full}",
            kind="redis_unavailable",
            field="data_dir",
            value=self._disk,
            remedy="Free space there; jobs continue by themselves then.",
        )

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
            # For example `redis.ConnectionError: Error 111 connecting to ...`.
            return self.unavailable(
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
            return self.unavailable(
                f"Redis at {self.address} takes no writes now: {text}",
                kind="redis_unavailable",
                field="redis_url",
                value=self.address,
                remedy="Free its disk, or point TROUPE_REDIS_URL at the primary.",
            )
        return Internal(f"Redis at {self.address}: {text}", kind="redis_error")


def shown(url: str) -> str:
    """The address in `url` without user and password, for logs and errors."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.scheme in CLUSTER_SCHEMES:
        return parts.netloc.rpartition("@")[2]
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path.rstrip('/')}"


def _server(url: str, options: Mapping[str, Any]) -> Any:
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


def _cluster(url: str, options: Mapping[str, Any]) -> Any:
    """A cluster client that discovers the nodes from those that the URL names."""
    parts = urlsplit(url)
    login, _, nodes = parts.netloc.rpartition("@")
    first, *others = nodes.split(",")
    netloc = f"{login}@{first}" if login else first
    return RedisCluster.from_url(
        urlunsplit((CLUSTER_SCHEMES[parts.scheme], netloc, "", parts.query, "")),
        startup_nodes=[_node(node) for node in others] or None,
        retry=Retry(NoBackoff(), _CLUSTER_TRIES),
        **options,
    )


def _node(address: str) -> ClusterNode:
    host, port = split_address(address)
    if not port.isdigit():
        raise ValueError(f"'{address}' is not HOST:PORT")
    return ClusterNode(host, int(port))


def _texts(info: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in info.items()}


def _added(infos: Sequence[dict[str, str]]) -> dict[str, str]:
    found = dict(infos[0])
    for name in ("used_memory", "maxmemory"):
        found[name] = str(sum(int(info[name]) for info in infos))
    versions = [info["redis_version"] for info in infos]
    found["redis_version"] = min(versions, key=lambda text: [*map(int, text.split("."))])
    return found
