"""Connections that many callers share: what is asked in one turn of the loop travels together.

A round trip of its own for every call costs more than what is carried: a system call on each side
to write it, another to read it. Replies come in order, so one reader hands them out. What carries
much has lanes of its own, that small calls need not wait behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis import exceptions
from redis._parsers import BaseParser

from services.experience_store.resp import Command, Replies, pack

# Small calls share one lane. Of the others, each goes to the lane that has least to do.
_BULK_LANES: Final = 3
_BULK_BYTES: Final = 32 * 2**10
# Replies of these may be large though they ask in few words.
_BULK_COMMANDS: Final = frozenset({"HMGET", "HGETALL"})
# Taken from a connection at once.
_READ_BYTES: Final = 2**20


class Lanes:
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
                data = await connection._reader.read(_READ_BYTES)
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
