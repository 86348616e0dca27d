"""Batch-level rollout (`pipeline.rollout: batch`): trajectories advance together, call by call.

A baseline to measure trajectory-level rollout against, as an environment manager has it that steps
a batch of environments at once: before each of its turns and tool calls every trajectory waits
until all that run are there. The slowest call of each round is everybody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.turn_backend import TurnBackend
from troupe.workflow import Agent, Endpoint, Sampling
from troupe.workflow.backend import Backend, EndpointOptions, GeneratedTurn, ToolBackend


class Lockstep:
    """A barrier that trajectories come to and leave for good. Whoever ends, however, leaves: nobody
    waits for a trajectory longer than its deadline."""

    def __init__(self) -> None:
        self._seats: set[BarrierSeat] = set()

    def seat(self, clock: TrajectoryClock) -> BarrierSeat:
        """For a trajectory, which takes part while it is entered."""
        return BarrierSeat(self, clock)

    def come(self, seat: BarrierSeat) -> None:
        """From now on nobody goes on without it."""
        self._seats.add(seat)

    def leave(self, seat: BarrierSeat) -> None:
        """From now on nobody waits for it."""
        self._seats.discard(seat)
        self.release()

    def release(self) -> None:
        """Let all calls go on once every trajectory has one waiting and none under way."""
        if all(seat.waiting and not seat.under_way for seat in self._seats):
            for seat in self._seats:
                seat.go()


class BarrierSeat:
    """One trajectory at the barrier. Its branches may call at the same time: they wait for each
    other's calls, too."""

    def __init__(self, lockstep: Lockstep, clock: TrajectoryClock) -> None:
        self._lockstep = lockstep
        self._clock = clock
        self.waiting: list[asyncio.Future[None]] = []
        self.under_way = 0

    def __enter__(self) -> Self:
        self._lockstep.come(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._lockstep.leave(self)

    def go(self) -> None:
        """Let the calls that wait begin."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                self.under_way += 1
                future.set_result(None)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Make a call, when all others are about to make one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self._lockstep.release()
        try:
            with self._clock.elsewhere():
                await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.under_way -= 1
            elif turn in self.waiting:
                self.waiting.remove(turn)
            self._lockstep.release()

    def backend(self, backend: TurnBackend) -> Backend:
        """The same with every generation in step."""
        return _Backend(backend, self)

    def tools(self, tools: ToolBackend) -> ToolBackend:
        """The same with every tool call in step."""
        return _Tools(tools, self)


class _Backend:
    def __init__(self, backend: TurnBackend, seat: BarrierSeat) -> None:
        self._backend = backend
        self._seat = seat

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        async with self._seat.call():
            return await self._backend.generate(agent, prompt_ids, sampling)

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        return self._backend.endpoint(agent, options)


class _Tools:
    def __init__(self, tools: ToolBackend, seat: BarrierSeat) -> None:
        self._tools = tools
        self._seat = seat

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        async with self._seat.call():
            return await self._tools.invoke(name, arguments_json, expected_seconds=expected_seconds)
