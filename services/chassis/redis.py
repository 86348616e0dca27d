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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

import structlog
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.chassis.telemetry import Telemetry
from troupe.disks import shortage
from troupe.rpc import (
    Attempts,
    FailedPrecondition,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)
from troupe.rpc.addresses import split_address
from troupe.rpc.errors import recast
from troupe.rpc.redis import CLUSTER_SCHEMES, check_url, failure, full, risks, shown, unfitness

log = structlog.get_logger(__name__)

T = TypeVar("T")

Value: TypeAlias = str | bytes | memoryview | int | float
Command: TypeAlias = Sequence[Value]
# Channel and message of a subscription; None when the subscription has begun.
Published: TypeAlias = tuple[bytes, bytes] | None

# A cluster client learns which node serves a slot from redirections (MOVED).
_CLUSTER_TRIES: Final = 3
# Maximum connections. Redis executes one command at a time, so a burst may as well queue here.
_MAX_CONNECTIONS: Final = 32
# Read timeout of a subscription, which is silent while nothing is published.
_LISTEN_SECONDS: Final = 1.0
# Seconds between two attempts to reach Redis when the service starts.
_START_BACKOFF: Final = RetryPolicy(initial_backoff=0.1, max_backoff=2.0)

# TimeoutError is an OSError; the cluster client also raises errors that are not RedisErrors.
FAILURES: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_OTHER_TYPE: Final = "WRONGTYPE"
# A key that is written to test whether Redis accepts writes, and its lifetime.
_PROBE: Final = "troupe:probe"
_PROBE_MILLISECONDS: Final = 1000
# Seconds between two checks of a Redis in use.
_WATCH_SECONDS: Final = 5.0


class KeyName:
    """The name of a key, as an attribute: the `base` of its object followed by `name`."""

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
        """Return the script `text` with its digest."""
        return Script(text, hashlib.sha1(text.encode()).hexdigest())


class RedisClient:
    """Client that runs commands and scripts on one Redis, and retries while it is unreachable."""

    unavailable: ClassVar[type[Unavailable]] = Unavailable
    """The error of a Redis that does not answer, or temporarily refuses writes."""
    one_server: ClassVar[bool] = False
    """Whether its scripts work on keys of several slots, which a Redis Cluster refuses."""
    waits_for: ClassVar[tuple[type[TroupeError], ...]] = (Unavailable,)
    """The errors after which a command is sent again, for `patience` seconds."""

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
        """`scripts`: Lua sources by name. `name`: the client's name in Redis (CLIENT SETNAME).

        One attempt takes at most `timeout` seconds; retries by `retries` end after `patience`
        seconds. `disk`: the data directory of a Redis on this machine, to report a full disk.
        Raises `FailedPrecondition` for an invalid URL.
        """
        check_url(url, one_server=self.one_server)
        self.address = shown(url)
        self.clustered = urlsplit(url).scheme in CLUSTER_SCHEMES
        self.problem: str | None = None
        """The reason why Redis cannot be reached, while `wait_ready` waits for it."""
        self.ready = False
        """Whether `wait_ready` has returned."""
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
        self._redis: Any = _cluster(url, options) if self.clustered else _server(url, options)

    async def call(self, *command: Value) -> Any:
        """Return the reply to one command: text as bytes, HGETALL as a dictionary, as in
        redis-py."""
        return (await self.call_each([command]))[0]

    async def call_each(
        self, commands: Sequence[Command], *, keep_mistyped: bool = False
    ) -> list[Any]:
        """Return the replies to commands that are sent as one pipeline, which is not atomic.

        Raises the first error among them. `keep_mistyped`: a WRONGTYPE error is returned as the
        reply of its command instead.
        """
        if not commands:
            return []

        return await self._patiently(lambda: self._try_each(commands, keep_mistyped))

    async def _try_each(
        self, commands: Sequence[Command], keep_mistyped: bool = False
    ) -> list[Any]:
        """Do `call_each` without retries."""
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

    async def run_script(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Return the reply of one script."""
        return await self.call(*self.script_command(script, keys, args))

    def script_command(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Command:
        """Return the command that runs a script, to be sent with others (`call_each`)."""
        return ("EVALSHA", self._scripts[script].sha, len(keys), *keys, *args)

    async def ping(self) -> None:
        """Raise an error unless Redis answers and accepts writes. Not repeated."""
        await self._try_each([("SET", _PROBE, "", "PX", _PROBE_MILLISECONDS)])

    async def check(self) -> list[str]:
        """Do `ping`, and return `risks`."""
        await self.ping()
        return await self.risks()

    async def risks(self) -> list[str]:
        """Return warnings about this Redis. Raises `FailedPrecondition` if it may delete stored
        keys."""
        return self._judged(await self._patiently(self._try_infos))

    async def info(self) -> dict[str, str]:
        """Return the fields of INFO. For a cluster: the total memory of all primaries, and the
        oldest version."""
        return _added(await self._patiently(self._try_infos))

    async def _try_infos(self) -> list[dict[str, str]]:
        """Return INFO of the server, or of each primary of the cluster."""
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                if not self.clustered:
                    return [_texts(await self._redis.execute_command("INFO"))]
                replies = await self._redis.execute_command(
                    "INFO", target_nodes=RedisCluster.PRIMARIES
                )
                return [_texts(reply) for reply in replies.values()]
        except FAILURES as error:
            raise await self._failure(error) from error

    def _judged(self, infos: Sequence[dict[str, str]]) -> list[str]:
        """Return warnings about these servers. Raises `TroupeError` if one cannot keep state."""
        for info in infos:
            error = unfitness(info, self.address, clustered=self.clustered)
            if isinstance(error, Unavailable):
                raise recast(error, self.unavailable)
            if error is not None:
                raise error
        return list(dict.fromkeys(risk for info in infos for risk in risks(info)))

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, which is repeated while Redis is unavailable."""
        attempts: Attempts | None = None
        while True:
            try:
                return await attempt()
            except TroupeError as error:
                if attempts is None:  # made when needed: few calls fail
                    attempts = Attempts(
                        self._retries, self._patience, lambda e: isinstance(e, self.waits_for)
                    )
                await attempts.failed(error)

    async def wait_ready(self) -> dict[str, str]:
        """Wait without a time limit until Redis answers, and return its INFO.

        The service is NOT_SERVING meanwhile. Raises `FailedPrecondition` if waiting would not help:
        the server is too old, may evict keys, or refuses the credentials.
        """
        attempt, rng = 0, random.Random()
        self.problem = f"it is waiting for Redis at {self.address}"
        while True:
            attempt += 1
            try:
                info = await self._check_server()
                self.problem, self.ready = None, True
                return info
            except Unavailable as error:
                self.problem = str(error)
                # Log each of the first few attempts, then about two a minute.
                if attempt <= 3 or attempt % 16 == 0:
                    log.warning("waiting_for_redis", attempt=attempt, error=str(error))
                await asyncio.sleep(_START_BACKOFF.backoff(min(attempt, 16), error, rng))

    async def listen(self, pattern: str) -> AsyncGenerator[Published, None]:
        """Stream the messages on channels that match `pattern`, on a separate connection.

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
        """Return the replies to a pipeline; an error reply is returned as an exception."""
        async with self._slots, asyncio.timeout(self._timeout):
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
        infos = await self._patiently(self._try_infos)
        for risk in self._judged(infos):
            log.warning("redis_risk", redis=self.address, risk=risk)
        try:
            await self._load_scripts()
        except FAILURES as error:
            raise await self._failure(error) from error
        try:
            await self.ping()
        except FailedPrecondition:
            raise
        except TroupeError as error:  # it may be full, and accept writes later
            log.warning("redis_unfit", redis=self.address, kind=error.kind, error=str(error))
        return _added(infos)

    async def _failure(self, error: Exception) -> TroupeError:
        """Return the typed error for an exception of redis-py."""
        found = failure(error, self.address, clustered=self.clustered)
        if isinstance(found, ResourceExhausted):
            return self._converted(full(self.address, await self._info_or_none()))
        if isinstance(found, Unavailable):
            found = recast(found, self.unavailable)
        found = self._converted(found)
        if self._disk is None or not isinstance(found, Unavailable):
            return found
        no_room = await asyncio.to_thread(shortage, self._disk)
        if no_room is None:
            return found
        return self.unavailable(
            f"{found.message}: {no_room}",
            kind="redis_unavailable",
            field="data_dir",
            value=self._disk,
            remedy="Free space there or make it writable; jobs then continue automatically.",
        )

    async def _info_or_none(self) -> dict[str, str] | None:
        """Return INFO for the text of an error; None if Redis does not answer."""
        if self.clustered:  # which node is full is unknown
            return None
        try:
            async with asyncio.timeout(self._timeout):
                return _texts(await self._redis.execute_command("INFO", "memory"))
        except FAILURES:
            return None

    def _converted(self, error: TroupeError) -> TroupeError:
        """Convert the error of a command to the one that this client raises."""
        return error


class RedisWatch:
    """A watch that checks every few seconds whether Redis still accepts writes and keeps keys.

    Its settings can change while services run. A change is logged, and set in a gauge.
    """

    def __init__(self, client: RedisClient, telemetry: Telemetry) -> None:
        self._client = client
        self._gauge = telemetry.gauge(
            "troupe_redis_unfit",
            "1 while Redis is unavailable, is full, refuses writes or may delete keys.",
        )
        self.trouble: TroupeError | None = None
        """The error found by the last check; None: Redis is healthy."""
        self._task: asyncio.Task[None] | None = None

    def start(self, changed: Callable[[TroupeError | None], Awaitable[None]] | None = None) -> None:
        """Begin the checks; `changed` is awaited with the new `trouble`."""
        self._task = asyncio.create_task(self._look_forever(changed), name="redis watch")

    async def stop(self) -> None:
        """End the checks. Repeatable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_forever(
        self, changed: Callable[[TroupeError | None], Awaitable[None]] | None
    ) -> None:
        while True:
            if await self.look() and changed is not None:
                await changed(self.trouble)
            await asyncio.sleep(_WATCH_SECONDS)

    async def look(self) -> bool:
        """Update `trouble`, and return whether it has changed."""
        before, now = self.trouble, None
        try:
            await self._client.check()
        except TroupeError as error:
            now = error
        self.trouble = now
        self._gauge.set(now is not None)
        # Texts contain figures that change at every check.
        if (before and (before.kind, before.remedy)) == (now and (now.kind, now.remedy)):
            return False
        if now is None:
            log.info("redis_fit_again", redis=self._client.address)
        else:
            log.warning("redis_unfit", redis=self._client.address, kind=now.kind, error=str(now))
        return True


def _server(url: str, options: Mapping[str, Any]) -> Any:
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


def _cluster(url: str, options: Mapping[str, Any]) -> Any:
    """Return a cluster client that discovers all nodes from the ones in the URL."""
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
