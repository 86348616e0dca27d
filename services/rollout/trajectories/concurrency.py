"""Control of when a trajectory may start, and how far it may proceed before its step is open.

`ConcurrencyGate` limits how many trajectories of a job run concurrently on this worker; `Turnstile`
limits how many of them continue in one iteration of the event loop; `EarlyStartGate` holds back
trajectories that began before their step (`pipeline.early_start`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from services.rollout.trajectories.clock import TrajectoryClock

# Trajectories admitted in one iteration of the event loop. If a whole step entered together, all
# its trajectories would start before the first one asked for a turn, and engines would idle until
# then.
_ENTRIES_PER_TICK: Final = 8
# Trajectories that continue with a reply in one iteration; timers and calls wait for its end.
_REPLIES_PER_TICK: Final = 4
# Their total computing time in one iteration. Reading a reply of a long conversation and requesting
# the next takes 1 to 10 ms, or 35 ms if a tool returned a long text (18,000 tokens).
_SECONDS_PER_TICK: Final = 0.025


class ConcurrencyGate:
    """A gate that admits trajectories in order of arrival, at most `limit` at a time and a few per
    event-loop iteration.

    With `one_query` (pipeline mode `serial`) all running trajectories belong to one query:
    trajectories of the next query enter when the last one of the current query has left.
    """

    def __init__(self, limit: int, *, one_query: bool = False) -> None:
        self._free = limit
        self._one_query = one_query
        self._current: str | None = None
        self._inside = 0
        self._entered_this_tick = 0
        # By query, longest waiting first. Without `one_query`, all have one key.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

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
        """Admit all that may enter. Takes constant time per entry, since whole steps wait here."""
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
            if not entry.done():  # otherwise it was cancelled while waiting
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


class Turnstile:
    """A turnstile that lets trajectories whose turn has ended continue in order, a few per
    event-loop iteration: at most a fixed number, fewer if they compute for long, always at least
    one.

    Engines end many turns at once. If all their trajectories continued in one iteration, it would
    last half a second with a few hundred of them, during which calls are not answered and timers do
    not run. The computing time of trajectories that continue together is known only after the
    iteration, so their number follows from the time of the last ones.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """Open the turnstile. `clock`: seconds that the event loop's thread has computed."""
        self._clock = clock
        self._began = 0.0
        self._passed_this_tick = 0
        self._fit = _REPLIES_PER_TICK
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for permission to continue; return immediately if few trajectories want to
        continue."""
        if not self._passed_this_tick:
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._next_tick)
        if not self._waiting and self._may_pass():
            self._passed_this_tick += 1
            return
        entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        await entry

    def _may_pass(self) -> bool:
        if not self._passed_this_tick:
            return True
        spent = self._clock() - self._began
        return self._passed_this_tick < self._fit and spent < _SECONDS_PER_TICK

    def _next_tick(self) -> None:
        now = self._clock()
        # Including everything else that the loop did meanwhile.
        spent = max(now - self._began, 1e-6)
        fit = int(_SECONDS_PER_TICK * self._passed_this_tick / spent)
        self._fit = max(1, min(_REPLIES_PER_TICK, fit))
        self._began, self._passed_this_tick = now, 0
        while self._waiting and self._may_pass():
            entry = self._waiting.popleft()
            if not entry.done():  # otherwise it was cancelled while waiting
                entry.set_result(None)
                self._passed_this_tick += 1
        if self._passed_this_tick:
            asyncio.get_running_loop().call_soon(self._next_tick)


class EarlyStartGate:
    """A gate that holds an early trajectory back until its step is open: before its end, and before
    each turn whose policy does not have its new weights yet.

    The trajectory may load its query, reset environments and call tools, since these do not depend
    on weights. Its clock stops while it waits.
    """

    def __init__(self, early: bool) -> None:
        self._step_open = not early
        # By policy; the empty name is for the end of the trajectory.
        self._open: dict[str, asyncio.Event] = {}
        self._since: float | None = None
        # Seconds from the first wait until the step was open.
        self.seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether the trajectory's step is not open yet."""
        return not self._step_open

    def policy_updated(self, policy: str) -> None:
        """Allow turns of a policy: its engines have the weights of the previous step."""
        self._event(policy).set()

    def open_step(self) -> None:
        """Allow everything: the step is open. Repeatable."""
        if self._since is not None and self.waits:
            self.seconds = time.monotonic() - self._since
        self._step_open = True
        for event in self._open.values():
            event.set()

    async def wait(self, policy: str = "", clock: TrajectoryClock | None = None) -> None:
        """Wait until the step is open or, for a turn, until `policy` is updated."""
        if self._step_open:
            return
        self._since = self._since or time.monotonic()
        with clock.paused() if clock is not None else nullcontext():
            await self._event(policy).wait()

    def _event(self, policy: str) -> asyncio.Event:
        return self._open.setdefault(policy, asyncio.Event())
