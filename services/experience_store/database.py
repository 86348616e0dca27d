"""Scripts and commands in Redis, and what a failure of Redis means to a caller."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as aioredis
import structlog
from redis import exceptions
from redis._parsers import BaseParser
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.experience_store.scripts import load_scripts
from troupe.rpc import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)

Command = Sequence[str | bytes | memoryview | int | float]

# Longer parts travel as they are; shorter ones are copied into one text.
_LONG: Final = 4096


def pack(commands: Iterable[Command]) -> list[bytes | memoryview]:
    """Buffers to be written one behind another."""
    buffers: list[bytes | memoryview] = []
    short: list[bytes | memoryview] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, str):
                part = part.encode()
            elif isinstance(part, int | float):
                part = repr(part).encode()
            size = len(part)
            if size < _LONG:
                short += (b"$%d\r\n" % size, part, b"\r\n")
            else:
                short.append(b"$%d\r\n" % size)
                buffers += (b"".join(short), part)
                short = [b"\r\n"]
    buffers.append(b"".join(short))
    return buffers


class Replies:
    """Takes bytes as they come, gives the replies that are complete."""

    def __init__(self, error_of: Callable[[str], Exception]) -> None:
        """`error_of`: the exception of an error's text."""
        self._error_of = error_of
        # Not parsed yet. As long as it has less than `_wanted` bytes nothing can be.
        self._chunks: list[bytes] = []
        self._size = 0
        self._wanted = 1
        # Arrays that are not complete: elements that are to come, and those that are here.
        self._open: list[tuple[int, list[Any]]] = []

    def feed(self, data: bytes) -> list[Any]:
        """The replies that `data` completes; errors as exceptions. Raises `InvalidResponse` for
        what is no reply.
        """
        try:
            return self._read(data)
        except ValueError as error:  # a size or an integer that is no number
            raise exceptions.InvalidResponse(f"Protocol Error: {error}") from error

    def _read(self, data: bytes) -> list[Any]:
        self._chunks.append(data)
        self._size += len(data)
        found: list[Any] = []
        if self._size < self._wanted:
            return found
        text = data if len(self._chunks) == 1 else b"".join(self._chunks)
        at, end = 0, len(text)
        wanted = 1
        while at < end:
            line = text.find(b"\r\n", at)
            if line < 0:
                wanted = end - at + 1
                break
            kind, value, behind = text[at], text[at + 1 : line], line + 2
            reply: Any
            if kind == 36:  # $
                size = int(value)
                if size < 0:
                    reply = None
                elif behind + size + 2 > end:
                    wanted = behind + size + 2 - at
                    break
                else:
                    reply = text[behind : behind + size]
                    behind += size + 2
            elif kind == 58:  # :
                reply = int(value)
            elif kind == 43:  # +
                reply = value
            elif kind == 42:  # *
                size = int(value)
                if size > 0:
                    self._open.append((size, []))
                    at = behind
                    continue
                reply = None if size < 0 else []
            elif kind == 45:  # -
                reply = self._error_of(value.decode(errors="replace"))
            else:
                raise exceptions.InvalidResponse(f"Protocol Error: {text[at:line]!r}")
            at = behind
            while self._open:
                size, elements = self._open[-1]
                elements.append(reply)
                if len(elements) < size:
                    break
                self._open.pop()
                reply = elements
            else:
                found.append(reply)
        rest = text[at:]
        self._chunks, self._size, self._wanted = ([rest] if rest else []), len(rest), wanted
        return found


# Small calls share one lane. Of the others, each goes to the lane that has least to do.
_BULK_LANES: Final = 3
_BULK_BYTES: Final = 32 * 2**10
# Replies of these may be large though they ask in few words.
_BULK_COMMANDS: Final = frozenset({"HMGET", "HGETALL"})
# Taken from a connection at once.
_LANE_READ_BYTES: Final = 2**20


class RedisLanes:
    """All lanes to one server. `connect` makes a connection of redis-py, not yet connected."""

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._small = _Lane(connect, timeout)
        self._bulk = [_Lane(connect, timeout) for _ in range(_BULK_LANES)]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, as they came; an exception where the server answered with an error.

        Raises what redis-py raises when the server is away, or does not answer in time.
        """
        lane = self._small
        if _is_bulk(commands):
            lane = min(self._bulk, key=lambda one: one.waiting)
        return await lane.send(commands)

    async def close(self) -> None:
        """Disconnect; whoever waits gets a `ConnectionError`."""
        for lane in (self._small, *self._bulk):
            await lane.close()


class _Call:
    """Commands of one caller, and the replies that came so far."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands
        self.replies: list[Any] = []
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()


class _Lane:
    """One connection; made when first needed, and again after it broke."""

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._connection: Any = None
        self._queue: list[_Call] = []
        self._flying: deque[_Call] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        # The tasks that an alarm made.
        self._breaking: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Calls that are not answered."""
        return len(self._queue) + len(self._flying)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        call = _Call(commands)
        self._queue.append(call)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())
        # A caller that leaves takes nothing back: its replies are read and thrown away.
        return await call.done

    async def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for task in (self._writer, self._reader):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._break(exceptions.ConnectionError("the connection was closed"))

    async def _write(self) -> None:
        """Send what is queued until nothing is; ends then."""
        try:
            while self._queue:
                async with asyncio.timeout(self._timeout):
                    if self._connection is None:
                        connection = self._connect()
                        await connection.connect()
                        self._connection = connection
                    calls, self._queue = self._queue, []
                    self._flying += calls
                    packed = pack(command for call in calls for command in call.commands)
                    if self._reader is None:
                        self._reader = asyncio.create_task(self._read(self._connection))
                    if self._alarm is None:
                        self._set_alarm()
                    await self._connection.send_packed_command(packed, check_health=False)
        except (exceptions.RedisError, OSError) as error:
            await self._break(error)
        finally:
            self._writer = None
            if self._queue:
                self._writer = asyncio.create_task(self._write())

    async def _read(self, connection: Any) -> None:
        """Hand out replies until nobody waits for one; ends then."""
        replies = Replies(BaseParser.parse_error)
        try:
            while self._flying:
                data = await connection._reader.read(_LANE_READ_BYTES)
                if not data:
                    raise exceptions.ConnectionError("the server closed the connection")
                for reply in replies.feed(data):
                    if isinstance(reply, exceptions.ConnectionError):
                        raise reply
                    if not self._flying:
                        raise exceptions.InvalidResponse("a reply that nobody asked for")
                    call = self._flying[0]
                    call.replies.append(reply)
                    if len(call.replies) == len(call.commands):
                        self._flying.popleft()
                        if not call.done.done():
                            call.done.set_result(call.replies)
        except OSError as error:
            await self._break(exceptions.ConnectionError(f"the connection broke: {error}"))
        except exceptions.RedisError as error:
            await self._break(error)
        finally:
            if self._reader is asyncio.current_task():
                self._reader = None

    def _set_alarm(self) -> None:
        """Look again after `timeout`: a timer per reply would cost more than the reply."""
        oldest = self._flying[0]
        seen = len(oldest.replies)

        def ring() -> None:
            self._alarm = None
            if self._flying and self._flying[0] is oldest and len(oldest.replies) == seen:
                error = exceptions.TimeoutError(f"no reply within {self._timeout:g} s")
                task = asyncio.create_task(self._break(error))
                self._breaking.add(task)
                task.add_done_callback(self._breaking.discard)
            elif self._flying:
                self._set_alarm()

        self._alarm = asyncio.get_running_loop().call_later(self._timeout, ring)

    async def _break(self, error: BaseException) -> None:
        """Tell all who wait, and begin anew: which reply would be whose is not known any more."""
        connection, self._connection = self._connection, None
        calls = [*self._flying, *self._queue]
        self._flying.clear()
        self._queue = []
        for call in calls:
            if not call.done.done():
                call.done.set_exception(error)
                # Seen, even if its caller has left.
                call.done.exception()
        reader, self._reader = self._reader, None
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        if connection is not None:
            await connection.disconnect(nowait=True)


def _is_bulk(commands: Sequence[Command]) -> bool:
    size = 0
    for command in commands:
        if command[0] in _BULK_COMMANDS:
            return True
        for part in command:
            if isinstance(part, bytes | str | memoryview):
                size += len(part)
        if size > _BULK_BYTES:
            return True
    return False


CLUSTER_SCHEMES: Final = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
# A client of a cluster learns who serves a slot by being told that another node does.
_CLUSTER_TRIES: Final = 3
_NAME: Final = "troupe-experience-store"
_READ_BYTES: Final = 2**16
# A listening socket is silent while nothing happens.
_LISTEN_SECONDS: Final = 1.0

# Channel and message; None once, when the listening has begun.
Heard: TypeAlias = tuple[bytes, bytes] | None


class Connection(Protocol):
    """What `database.Database` needs of Redis."""

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, an exception where Redis answered with an error."""

    async def load(self, scripts: Iterable[str]) -> None:
        """Make every server know the scripts."""

    async def info(self) -> dict[str, str]:
        """What the servers say about themselves, by name."""

    def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """What is published on channels like `pattern`, for ever, on a connection of its own."""

    async def close(self) -> None:
        """Give all connections back."""


def connect_to(url: str, timeout: float) -> Connection:
    """The connection that `url` describes; nothing is sent yet. Raises `ValueError`."""
    if urlsplit(url).scheme in CLUSTER_SCHEMES:
        return ClusterConnection(url, timeout)
    return ServerConnection(url, timeout)


class ServerConnection:
    """One Redis server."""

    def __init__(self, url: str, timeout: float) -> None:
        self._pool = aioredis.ConnectionPool.from_url(
            url,
            # Bounded by the caller: redis-py's own way (asyncio.wait_for) swallows cancellation
            # on Python 3.11, and makes a task of every write.
            socket_timeout=None,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name=_NAME,
        )
        self._redis: Any = aioredis.Redis(connection_pool=self._pool)
        self._lanes = RedisLanes(self._pool.make_connection, timeout)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """See `Connection.send`."""
        replies = await self._lanes.send(commands)
        return [self._shaped(*pair) for pair in zip(commands, replies, strict=True)]

    def _shaped(self, command: Command, reply: Any) -> Any:
        """The reply as redis-py shapes that of this command: HGETALL as a dictionary, and so on."""
        shape = self._redis.response_callbacks.get(command[0])
        return reply if shape is None or isinstance(reply, Exception) else shape(reply)

    async def load(self, scripts: Iterable[str]) -> None:
        """See `Connection.load`."""
        for reply in await self.send([("SCRIPT", "LOAD", text) for text in scripts]):
            if isinstance(reply, Exception):
                raise reply

    async def info(self) -> dict[str, str]:
        """See `Connection.info`."""
        info = await self._redis.execute_command("INFO")
        return {str(name): str(value) for name, value in info.items()}

    async def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """See `Connection.listen`."""
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        replies = Replies(BaseParser.parse_error)
        try:
            await connection.connect()
            await connection.send_command("PSUBSCRIBE", pattern)
            while True:
                data = await connection._reader.read(_READ_BYTES)
                if not data:
                    raise exceptions.ConnectionError("the server closed the connection")
                for reply in replies.feed(data):
                    if isinstance(reply, Exception):
                        raise reply
                    if reply[0] == b"pmessage":
                        yield reply[2], reply[3]
                    elif reply[0] == b"psubscribe":
                        yield None
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """See `Connection.close`."""
        await self._lanes.close()
        await self._redis.aclose()
        await self._pool.disconnect()


class ClusterConnection:
    """The nodes of a Redis Cluster, found through those that the URL names."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        login, _, places = parts.netloc.rpartition("@")
        first, *others = places.split(",")
        netloc = f"{login}@{first}" if login else first
        scheme = CLUSTER_SCHEMES[parts.scheme]
        self._redis: Any = RedisCluster.from_url(
            urlunsplit((scheme, netloc, "", parts.query, "")),
            startup_nodes=[_node(place) for place in others] or None,
            socket_timeout=None,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), _CLUSTER_TRIES),
            protocol=2,
            client_name=_NAME,
        )

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """See `Connection.send`; what belongs to one node travels together."""
        return await _send(self._redis, commands)

    async def load(self, scripts: Iterable[str]) -> None:
        """See `Connection.load`: every primary must know them."""
        for text in scripts:
            await self._redis.execute_command(
                "SCRIPT LOAD", text, target_nodes=RedisCluster.PRIMARIES
            )

    async def info(self) -> dict[str, str]:
        """See `Connection.info`: memory of all primaries together, the oldest version."""
        replies = await self._redis.execute_command("INFO", target_nodes=RedisCluster.PRIMARIES)
        infos = list(replies.values())
        found = {str(name): str(value) for name, value in infos[0].items()}
        for name in ("used_memory", "maxmemory"):
            found[name] = str(sum(int(info[name]) for info in infos))
        versions = [str(info["redis_version"]) for info in infos]
        found["redis_version"] = min(versions, key=lambda text: [*map(int, text.split("."))])
        return found

    async def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """See `Connection.listen`: what is published at one node is heard at every other."""
        pubsub: PubSub = self._redis.pubsub()
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
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """See `Connection.close`."""
        await self._redis.aclose()


async def _send(client: Any, commands: Sequence[Command]) -> list[Any]:
    if len(commands) == 1:
        try:
            return [await client.execute_command(*commands[0])]
        except exceptions.ResponseError as error:
            return [error]
    pipe = client.pipeline(transaction=False)
    async with pipe:
        for command in commands:
            pipe.execute_command(*command)
        return list(await pipe.execute(raise_on_error=False))


def _node(place: str) -> ClusterNode:
    host, _, port = place.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"'{place}' is not HOST:PORT")
    return ClusterNode(host, int(port))


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
class ScriptCall:
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
        return (await self.run_each([ScriptCall(script, base, args)]))[0]

    async def run_each(self, calls: Sequence[ScriptCall]) -> list[list[Any]]:
        """The replies of several scripts, sent together. Each is atomic, together they are not."""
        commands: list[Command] = []
        places: list[int] = []
        for call in calls:
            commands += call.before
            places.append(len(commands))
            commands.append(self._command(call))
        replies = await self.execute_each(commands, missing_scripts=calls)
        return [list(replies[place]) for place in places]

    async def run_all(
        self, before: Sequence[Command], calls: Sequence[ScriptCall]
    ) -> list[list[Any]]:
        """The replies of several scripts, sent together behind commands on any of their keys: only
        where one server has them all."""
        commands = [*before, *map(self._command, calls)]
        replies = await self.execute_each(commands, missing_scripts=calls)
        return [list(reply) for reply in replies[len(before) :]]

    def _command(self, call: ScriptCall) -> Command:
        return ("EVALSHA", self._scripts[call.script].sha, 1, call.base, *call.args)

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """The reply of one command."""
        return (await self.execute_each([command]))[0]

    async def execute_each(
        self,
        commands: Sequence[Command],
        *,
        missing_scripts: Sequence[ScriptCall] = (),
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
