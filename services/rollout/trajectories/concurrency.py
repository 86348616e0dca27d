"""The limit on how many trajectories of a job run at once on this worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

# Trajectories admitted in one iteration of the event loop. If a whole step entered at once, all of
# it would start before the first trajectory asked for a turn, and engines would idle until then.
_ENTRIES_PER_TICK: Final = 8


class ConcurrencyGate:
    """Admits trajectories in order of arrival, at most `limit` at once and a few per event-loop
    iteration.

    With `one_query` (pipeline mode `serial`) all running trajectories belong to one query: those of
    the next query enter when the last of the current one's have left.
    """

    def __init__(self, limit: int, *, one_query: bool = False) -> None:
        self._free = limit
        self._one_query = one_query
        self._current: str | None = None
        self._inside = 0
        self._entered_this_tick = 0
        # By query, longest waiting first. Without `one_query` all are under one name.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def inside(self) -> int:
        """Number of running trajectories."""
        return self._inside

    @asynccontextmanager
    async def enter(self, query_id: str) -> AsyncIterator[None]:
        """Wait for admission; the trajectory counts as running inside the context."""
        entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = query_id if self._one_query else ""
        self._waiting.setdefault(queue, deque()).append(entry)
        self._admit()
        try:
            await entry
            yield
        finally:
            if entry.done() and not entry.cancelled():
                self._inside -= 1
                self._free += 1
            self._admit()

    def _admit(self) -> None:
        """Admit whoever may enter. Constant time per entry, since whole steps wait here."""
        if self._inside == 0:
            self._current = None
        while self._waiting and self._free > 0 and self._entered_this_tick < _ENTRIES_PER_TICK:
            if self._current is None:
                self._current = next(iter(self._waiting))
            queue = self._waiting.get(self._current)
            if queue is None:  # the next query waits until the current one has left
                return
            entry = queue.popleft()
            if not queue:
                del self._waiting[self._current]
            if not entry.done():  # cancelled while it waited otherwise
                self._free -= 1
                self._inside += 1
                if not self._entered_this_tick:
                    asyncio.get_running_loop().call_soon(self._next_tick)
                self._entered_this_tick += 1
                entry.set_result(None)
            elif self._inside == 0:
                self._current = None

    def _next_tick(self) -> None:
        self._entered_this_tick = 0
        self._admit()
