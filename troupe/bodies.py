"""HTTP request bodies, read within bounds: of one body, of all that are in memory, of time.

Web servers hand a body out in pieces and leave its size to the application; frameworks collect it
whole. A client could fill the memory of the process with one request.
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
# A client that sends too much is read on for so many times the limit: it only then hears why.
_PATIENCE: Final = 4
# Bodies of the largest size that may be in memory at once.
_AT_ONCE: Final = 16


class BodyTooLarge(Exception):
    """A body has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes")
        self.limit = limit


class BodyTooSlow(Exception):
    """A body did not arrive in `seconds`: its client is slow, or others' fill the memory."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body did not arrive within {seconds:g} s")
        self.seconds = seconds


class ClientGone(Exception):
    """The client closed the connection before its body was whole."""


class BodyReader:
    """Reads the bodies of one server's requests. Used from one event loop."""

    def __init__(self, limit: int, *, total: int | None = None) -> None:
        """`limit`: of one body, in bytes; `total`: of all that are held at once."""
        self.limit = limit
        self._room = total if total is not None else _AT_ONCE * limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def read(self, headers: Any, receive: Receive) -> AsyncIterator[bytearray]:
        """The body of the request with these (ASGI) `headers`; its bytes count as held until the
        block is left.

        Raises `BodyTooLarge`, `BodyTooSlow`, `ClientGone`.
        """
        declared = _declared(headers)
        if declared is not None and declared > _PATIENCE * self.limit:
            raise BodyTooLarge(self.limit)
        held = self.limit if declared is None else min(declared, self.limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._take(held)
        except TimeoutError:
            raise BodyTooSlow(BODY_SECONDS) from None
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._whole(receive)
            except TimeoutError:
                raise BodyTooSlow(BODY_SECONDS) from None
            if len(body) < held:
                self._give(held - len(body))
                held = len(body)
            yield body
        finally:
            self._give(held)

    async def _whole(self, receive: Receive) -> bytearray:
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
            elif size > _PATIENCE * self.limit:
                break
        if size > self.limit:
            raise BodyTooLarge(self.limit)
        return body

    async def _take(self, count: int) -> None:
        """Wait until `count` bytes are free; who came first goes first."""
        if not self._waiting and count <= self._room:
            self._room -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(count)
            raise

    def _give(self, count: int) -> None:
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
    """The body's size as its header says; None: sent in chunks. Servers have checked the number."""
    sent = dict(headers)
    if b"transfer-encoding" in sent:
        return None
    length = sent.get(b"content-length", b"0")
    return int(length) if length.isdigit() else None
