"""Bounded HTTP connections: clients that connect and send nothing cannot keep others out.

uvicorn waits without limit for the first request of a connection, and for the rest of one that has
begun. Every such connection takes an open file, and if a process has none left, all of its
connections fail, those to other services included.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final

# How many connections without a request a server keeps: a part of the open files of its process.
_FEWEST: Final = 16
_PART: Final = 4
# A connection's request has this time to arrive, even if many connections are made at once.
_GRACE_SECONDS: Final = 1.0


def most_idle() -> int:
    """Return how many connections without a request a server keeps."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_FEWEST, files // _PART)


def bounded_protocol(most: int) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol for one server that keeps `most` connections without a
    request: silent ones, those whose request's head has not arrived, and those kept for a next
    request. A further one closes the one that has been idle for longest.

    Connections whose request is being answered are neither counted nor closed.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    # In the order in which they became idle, with the time.
    idle: dict[Any, float] = {}
    trimming: asyncio.TimerHandle | None = None

    def trim() -> None:
        nonlocal trimming
        loop, trimming = asyncio.get_running_loop(), None
        while len(idle) > most:
            oldest, since = next(iter(idle.items()))
            if loop.time() < since + _GRACE_SECONDS:
                trimming = loop.call_later(_GRACE_SECONDS, trim)
                return
            del idle[oldest]
            oldest.transport.abort()

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._now_idle()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                idle.pop(self, None)

        def on_response_complete(self) -> None:
            self._now_idle()
            super().on_response_complete()

        def _now_idle(self) -> None:
            idle[self] = self.loop.time()
            if len(idle) > most and trimming is None:
                trim()

    return BoundedProtocol
