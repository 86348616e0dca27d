"""How many trajectories of a job run at once on this worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets trajectories in, first come first served, at most `limit` at once.

    With `one_query` (pipeline mode `serial`) all that run belong to one query: the next query's
    trajectories enter when the last of the current one's have left.
    """

    def __init__(self, limit: int, *, one_query: bool = False) -> None:
        self._free = limit
        self._one_query = one_query
        self._current: str | None = None
        self._inside = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def inside(self) -> int:
        """Trajectories that run now."""
        return self._inside

    @asynccontextmanager
    async def enter(self, query_id: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((query_id, ticket))
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
        if self._inside == 0:
            self._current = None
        kept: deque[tuple[str, asyncio.Future[None]]] = deque()
        while self._waiting and self._free > 0:
            query_id, ticket = self._waiting.popleft()
            if ticket.done():  # cancelled while it waited
                continue
            if self._one_query and self._current not in (None, query_id):
                kept.append((query_id, ticket))
                continue
            self._current = query_id
            self._free -= 1
            self._inside += 1
            ticket.set_result(None)
        self._waiting = kept + self._waiting
