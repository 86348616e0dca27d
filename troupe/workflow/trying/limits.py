"""Time limits of what is played in this process, which end where a person begins to debug."""

from __future__ import annotations

import asyncio
import contextlib
import pdb
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

# The running limits, each with its event loop.
_running: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Do the same as `asyncio.timeout`, until a breakpoint is reached (`debuggable`)."""
    async with asyncio.timeout(seconds) as limit:
        _running[limit] = asyncio.get_running_loop()
        try:
            yield limit
        finally:
            del _running[limit]


@contextlib.contextmanager
def debuggable() -> Iterator[None]:
    """Meanwhile, `breakpoint()` and `pdb.set_trace()` lift the time limits of what is running,
    also the timer that interrupts a workflow that blocks: a person may take any time to look."""
    former = pdb.set_trace

    def set_trace(*, header: str | None = None, **more: Any) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for limit, loop in list(_running.items()):
            loop.call_soon_threadsafe(_lift, limit)
        debugger = pdb.Pdb()
        if header is not None:
            debugger.message(header)
        debugger.set_trace(sys._getframe(1), **more)

    pdb.set_trace = set_trace
    try:
        yield
    finally:
        pdb.set_trace = former


def _lift(limit: asyncio.Timeout) -> None:
    if limit in _running and not limit.expired():
        limit.reschedule(None)
