"""How many trajectories of a job run at once on this worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

# Trajectories that enter in one turn of the event loop. If those of a whole step did, each would be
# begun before the first one asked for a turn, and engines would have nothing to do until then.
_AT_ONCE: Final = 8


class Gate:
    """Lets trajectories in, first come first served, at most `limit` at once, a few at a time.

    With `one_query` (pipeline mode `serial`) all that run belong to one query: the next query's
    trajectories enter when the last of the current one's have left.
    """

    def __init__(self, limit: int, *, one_query: bool = False) -> None:
        self._free = limit
        self._one_query = one_query
        self._current: str | None = None
        self._inside = 0
        # In this turn of the event loop.
        self._entered = 0
        # By query, the one that waits longest first. Not `one_query`: all under one name.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def inside(self) -> int:
        """Trajectories that run now."""
        return self._inside

    @asynccontextmanager
    async def enter(self, query_id: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = query_id if self._one_query else ""
        self._waiting.setdefault(queue, deque()).append(ticket)
        self._admit()
        try:
            await ticket
            yield
        finally:
            if ticket.done() and not ticket.cancelled():
                self._inside -= 1
                self._free += 1
            self._admit()

    def _admit(self) -> None:
        """Constant time per ticket: whole steps wait here."""
        if self._inside == 0:
            self._current = None
        while self._waiting and self._free > 0 and self._entered < _AT_ONCE:
            if self._current is None:
                self._current = next(iter(self._waiting))
            queue = self._waiting.get(self._current)
            if queue is None:  # the next query waits until this one has left
                return
            ticket = queue.popleft()
            if not queue:
                del self._waiting[self._current]
            if not ticket.done():  # else it was cancelled while it waited
                self._free -= 1
                self._inside += 1
                if not self._entered:
                    asyncio.get_running_loop().call_soon(self._next_turn)
                self._entered += 1
                ticket.set_result(None)
            elif self._inside == 0:
                self._current = None

    def _next_turn(self) -> None:
        self._entered = 0
        self._admit()
