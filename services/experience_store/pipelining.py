"""A few connections to one Redis, shared by all calls of the store.

Calls that arrive while others are in flight are written together, and replies are read as they
come. One connection serves small calls, three serve calls with rows. redis-py's own pool checks a
connection out for each call, writes to it and reads from it.

Measured with rows of 4096 tokens and 64 writers (`benchmarks.experience_store`, in turns on two
cores): with redis-py's own pool instead of this module the store's `raw_ratio_4k` is 35 % to 45 %
lower, and its process takes 24 % more CPU per row. (With hiredis the CPU is that of this module,
but raw Redis gains more, and the ratio stays as low.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis import exceptions
from redis._parsers import BaseParser

from services.chassis.redis import Command

# Small calls share one connection. Every other call goes to the least busy connection.
_BULK_CONNECTIONS: Final = 3
_BULK_BYTES: Final = 32 * 2**10
# Replies to these may be large though the commands are short.
_BULK_COMMANDS: Final = frozenset({"HMGET", "HGETALL"})
# Read from a connection at once.
_READ_BYTES: Final = 2**20


class RedisReplyParser:
    """A parser of Redis protocol replies (version 2) from bytes as they arrive."""

    def __init__(self, error_of: Callable[[str], Exception]) -> None:
        """`error_of` makes the exception for the text of an error reply."""
        self._error_of = error_of
        # Bytes not parsed yet. No reply is complete before there are `_wanted` of them.
        self._chunks: list[bytes] = []
        self._size = 0
        self._wanted = 1
        # Incomplete arrays: the length of each, and the elements so far.
        self._open: list[tuple[int, list[Any]]] = []

    def feed(self, data: bytes) -> list[Any]:
        """Return the replies that `data` completes, with error replies as exceptions.

        Raises `InvalidResponse` for bytes that are not a reply.
        """
        try:
            return self._read(data)
        except ValueError as error:  # a size or an integer that is not a number
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


class PipelinedConnections:
    """The connections to one server. `connect` makes an unconnected redis-py connection."""

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._small = _PipelinedConnection(connect, timeout)
        self._bulk = [_PipelinedConnection(connect, timeout) for _ in range(_BULK_CONNECTIONS)]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and return the replies as received; an error reply is an exception.

        Raises redis-py's errors when the server is away or does not answer in time.
        """
        connection = self._small
        if _is_bulk(commands):
            connection = min(self._bulk, key=lambda one: one.waiting)
        return await connection.send(commands)

    async def close(self) -> None:
        """Disconnect. Calls that wait for replies raise `ConnectionError`."""
        for connection in (self._small, *self._bulk):
            await connection.close()


class _Call:
    """Commands of one caller, and their replies so far."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands
        self.replies: list[Any] = []
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()


class _PipelinedConnection:
    """A connection to Redis, made when first needed and remade after it broke."""

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._connection: Any = None
        self._queue: list[_Call] = []
        self._in_flight: deque[_Call] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        # Tasks that fail the calls of a server which did not answer in time.
        self._breaking: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of calls that are not answered yet."""
        return len(self._queue) + len(self._in_flight)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        call = _Call(commands)
        self._queue.append(call)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())
        # When the caller is cancelled, Redis still executes its commands, and the replies are read
        # and discarded.
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
        """Send queued commands until the queue is empty."""
        try:
            while self._queue:
                async with asyncio.timeout(self._timeout):
                    if self._connection is None:
                        connection = self._connect()
                        await connection.connect()
                        self._connection = connection
                    calls, self._queue = self._queue, []
                    self._in_flight += calls
                    commands = [command for call in calls for command in call.commands]
                    packed = self._connection.pack_commands(commands)
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
        """Hand replies to their calls until every call has all its replies."""
        replies = RedisReplyParser(BaseParser.parse_error)
        try:
            while self._in_flight:
                data = await connection._reader.read(_READ_BYTES)
                if not data:
                    raise exceptions.ConnectionError("the server closed the connection")
                for reply in replies.feed(data):
                    if isinstance(reply, exceptions.ConnectionError):
                        raise reply
                    if not self._in_flight:
                        raise exceptions.InvalidResponse("a reply without a command")
                    call = self._in_flight[0]
                    call.replies.append(reply)
                    if len(call.replies) == len(call.commands):
                        self._in_flight.popleft()
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
        """Check for progress after `timeout`. A timer per reply would cost more than the reply."""
        oldest = self._in_flight[0]
        seen = len(oldest.replies)

        def ring() -> None:
            self._alarm = None
            if self._in_flight and self._in_flight[0] is oldest and len(oldest.replies) == seen:
                error = exceptions.TimeoutError(f"no reply within {self._timeout:g} s")
                task = asyncio.create_task(self._break(error))
                self._breaking.add(task)
                task.add_done_callback(self._breaking.discard)
            elif self._in_flight:
                self._set_alarm()

        self._alarm = asyncio.get_running_loop().call_later(self._timeout, ring)

    async def _break(self, error: BaseException) -> None:
        """Fail all calls and disconnect: which reply belongs to which call is unknown."""
        connection, self._connection = self._connection, None
        calls = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue = []
        for call in calls:
            if not call.done.done():
                call.done.set_exception(error)
                # Mark the exception as retrieved, in case the caller was cancelled.
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
