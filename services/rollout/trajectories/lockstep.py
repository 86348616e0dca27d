"""Batch-level rollout (`pipeline.rollout: batch`): trajectories advance together, call by call.

A baseline for trajectory-level rollout that models an environment manager which steps a batch of
environments at once: before each turn and tool call every trajectory waits until all running ones
are about to make a call. The slowest call of a round delays all.
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
    """The barrier of a job's running trajectories. Every trajectory leaves it when it ends, so that
    none waits beyond another's deadline."""

    def __init__(self) -> None:
        self._members: set[BarrierMember] = set()

    def member(self, clock: TrajectoryClock) -> BarrierMember:
        """Return a new member for one trajectory, which takes part while it is entered as a
        context."""
        return BarrierMember(self, clock)

    def join(self, member: BarrierMember) -> None:
        """Make all calls wait for `member` from now on."""
        self._members.add(member)

    def leave(self, member: BarrierMember) -> None:
        """Stop waiting for `member`."""
        self._members.discard(member)
        self.release()

    def release(self) -> None:
        """Let all waiting calls begin if every trajectory has one waiting and none running."""
        if all(member.waiting and not member.running for member in self._members):
            for member in self._members:
                member.release()


class BarrierMember:
    """One trajectory at the barrier. Its branches may call concurrently; they then also wait for
    each other's calls."""

    def __init__(self, lockstep: Lockstep, clock: TrajectoryClock) -> None:
        self._lockstep = lockstep
        self._clock = clock
        self.waiting: list[asyncio.Future[None]] = []
        self.running = 0

    def __enter__(self) -> Self:
        self._lockstep.join(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._lockstep.leave(self)

    def release(self) -> None:
        """Let this trajectory's waiting calls begin."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                self.running += 1
                future.set_result(None)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Enter the context of one call when all other trajectories are about to make one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self._lockstep.release()
        try:
            with self._clock.outside():
                await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.running -= 1
            elif turn in self.waiting:
                self.waiting.remove(turn)
            self._lockstep.release()

    def backend(self, backend: TurnBackend) -> Backend:
        """Return `backend` with every generation at the barrier."""
        return _Backend(backend, self)

    def tools(self, tools: ToolBackend) -> ToolBackend:
        """Return `tools` with every call at the barrier."""
        return _Tools(tools, self)


class _Backend:
    def __init__(self, backend: TurnBackend, member: BarrierMember) -> None:
        self._backend = backend
        self._member = member

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        async with self._member.call():
            return await self._backend.generate(agent, prompt_ids, sampling)

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        return self._backend.endpoint(agent, options)


class _Tools:
    def __init__(self, tools: ToolBackend, member: BarrierMember) -> None:
        self._tools = tools
        self._member = member

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        async with self._member.call():
            return await self._tools.invoke(name, arguments_json, expected_seconds=expected_seconds)
