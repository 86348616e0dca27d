"""Bounded reading of HTTP request bodies: bytes per body, per client and in memory, and time.

ASGI servers deliver bodies in chunks of unlimited total size, and frameworks buffer them whole: one
request could fill the memory of the process. Memory is reserved as bytes arrive, so a body that is
announced but not sent takes none. Each client has a share of it, so that none can block the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

# A body has this time, plus the time that its bytes need at the lowest tolerated rate.
BODY_SECONDS: Final = 10.0
_BYTES_PER_SECOND: Final = 512 << 10
# How long a partly received body waits for memory.
ROOM_SECONDS: Final = 30.0
# A body that is too large is read up to this multiple of the limit, so that the client reads the
# error response.
_READ_ON: Final = 4
# Defaults of `total` and `share`, in bodies of maximum size.
_AT_ONCE: Final = 16
_SHARE: Final = 4


class BodyTooLarge(Exception):
    """A body has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes")
        self.limit = limit


class BodyTooSlow(Exception):
    """A body did not arrive within `seconds`: the client is slow, or other bodies use the
    memory."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body did not arrive within {seconds:g} s")
        self.seconds = seconds


class ClientGone(Exception):
    """The client closed the connection before the end of its body."""


@dataclass(eq=False)
class _Holding:
    """The share of the memory that one body holds."""

    owner: Hashable
    size: int = 0


class BodyReader:
    """The reader of one server's request bodies. Use it from one event loop."""

    def __init__(self, limit: int, *, total: int | None = None, share: int | None = None) -> None:
        """Set limits in bytes: `limit` for one body, `total` for all bodies in memory, `share` for
        the bodies of one client."""
        self.limit = limit
        # The rest of the total is for the body that goes ahead.
        self._shared = max(0, (_AT_ONCE * limit if total is None else total) - limit)
        self._share = _SHARE * limit if share is None else share
        self._held = 0
        self._held_by: Counter[Hashable] = Counter()
        # Bodies that wait for memory, in the order of their arrival, with the event that wakes
        # them.
        self._waiting: dict[_Holding, asyncio.Event] = {}
        # The body that may exceed the memory; otherwise partly received bodies could wait for one
        # another.
        self._ahead: _Holding | None = None

    @asynccontextmanager
    async def read(
        self, headers: Any, receive: Receive, owner: Hashable = None
    ) -> AsyncIterator[bytearray]:
        """Yield the body of a request with ASGI `headers`; its memory is held until the block ends.
        `owner` is the client whose share it uses.

        Raises `BodyTooLarge`, `BodyTooSlow`, `ClientGone`.
        """
        declared = _declared(headers)
        if declared is not None and declared > _READ_ON * self.limit:
            raise BodyTooLarge(self.limit)
        holding = _Holding(owner)
        try:
            yield await self._collect(receive, holding)
        finally:
            self._release(holding)

    async def _collect(self, receive: Receive, holding: _Holding) -> bytearray:
        body, size, more = bytearray(), 0, True
        left = BODY_SECONDS
        clock = asyncio.get_running_loop().time
        while more:
            began = clock()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow(BODY_SECONDS + size / _BYTES_PER_SECOND) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(chunk)
            left += len(chunk) / _BYTES_PER_SECOND - (clock() - began)
            if size <= self.limit:
                await self._reserve(holding, len(chunk))
                body += chunk
            elif size > _READ_ON * self.limit:
                break
        if size > self.limit:
            raise BodyTooLarge(self.limit)
        return body

    async def _reserve(self, holding: _Holding, count: int) -> None:
        """Reserve `count` more bytes. Raises `BodyTooSlow`."""
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while not self._may_hold(holding, count):
                    freed = self._waiting.setdefault(holding, asyncio.Event())
                    freed.clear()
                    await freed.wait()
        except TimeoutError:
            raise BodyTooSlow(ROOM_SECONDS) from None
        finally:
            self._waiting.pop(holding, None)
        holding.size += count
        self._held += count
        self._held_by[holding.owner] += count

    def _may_hold(self, holding: _Holding, count: int) -> bool:
        """Return whether `holding` may take `count` more bytes."""
        if self._ahead is holding:
            return True
        if (
            self._held + count <= self._shared
            and self._held_by[holding.owner] + count <= self._share
        ):
            return True
        first = next(iter(self._waiting), holding)
        if self._ahead is None and first is holding:
            self._ahead = holding
            return True
        return False

    def _release(self, holding: _Holding) -> None:
        self._held -= holding.size
        self._held_by[holding.owner] -= holding.size
        if not self._held_by[holding.owner]:
            del self._held_by[holding.owner]
        if self._ahead is holding:
            self._ahead = None
        for freed in self._waiting.values():
            freed.set()


def _declared(headers: Any) -> int | None:
    """Return Content-Length; None for a chunked body. The server has checked the number."""
    sent = dict(headers)
    if b"transfer-encoding" in sent:
        return None
    length = sent.get(b"content-length", b"0")
    return int(length) if length.isdigit() else None
