"""Bounded reading of HTTP request bodies: bytes per body, bytes of all bodies in memory, time.

ASGI servers deliver bodies in chunks of unlimited total size, and frameworks buffer them whole: one
request could fill the memory of the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

BODY_SECONDS: Final = 30.0
# A body that is too large is read up to this multiple of the limit, so that the client reads the
# error response.
_READ_ON: Final = 4
# Default of `total`, in bodies of maximum size.
_AT_ONCE: Final = 16


class BodyTooLarge(Exception):
    """A body has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes")
        self.limit = limit


class BodyTooSlow(Exception):
    """A body did not arrive in `seconds`: the client is slow, or other bodies use the memory."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body did not arrive within {seconds:g} s")
        self.seconds = seconds


class ClientGone(Exception):
    """The client closed the connection before the end of its body."""


class BodyReader:
    """Reads request bodies of one server. Used from one event loop."""

    def __init__(self, limit: int, *, total: int | None = None) -> None:
        """`limit`: bytes of one body; `total`: bytes of all bodies in memory."""
        self.limit = limit
        self._room = total if total is not None else _AT_ONCE * limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def read(self, headers: Any, receive: Receive) -> AsyncIterator[bytearray]:
        """The body of a request with ASGI `headers`; its bytes are reserved until the block ends.

        Raises `BodyTooLarge`, `BodyTooSlow`, `ClientGone`.
        """
        declared = _declared(headers)
        if declared is not None and declared > _READ_ON * self.limit:
            raise BodyTooLarge(self.limit)
        held = self.limit if declared is None else min(declared, self.limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._reserve(held)
        except TimeoutError:
            raise BodyTooSlow(BODY_SECONDS) from None
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._collect(receive)
            except TimeoutError:
                raise BodyTooSlow(BODY_SECONDS) from None
            if len(body) < held:
                self._free(held - len(body))
                held = len(body)
            yield body
        finally:
            self._free(held)

    async def _collect(self, receive: Receive) -> bytearray:
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(chunk)
            if size <= self.limit:
                body += chunk
            elif size > _READ_ON * self.limit:
                break
        if size > self.limit:
            raise BodyTooLarge(self.limit)
        return body

    async def _reserve(self, count: int) -> None:
        """Reserve `count` bytes; waits in order of arrival."""
        if not self._waiting and count <= self._room:
            self._room -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(count)
            raise

    def _free(self, count: int) -> None:
        self._room += count
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if wanted > self._room:
                    return
                self._room -= wanted
                turn.set_result(None)
            self._waiting.popleft()


def _declared(headers: Any) -> int | None:
    """Content-Length; None for a chunked body. The server has checked the number."""
    sent = dict(headers)
    if b"transfer-encoding" in sent:
        return None
    length = sent.get(b"content-length", b"0")
    return int(length) if length.isdigit() else None
