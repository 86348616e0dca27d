"""Batch-level rollout: trajectories that wait for each other before every call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.lockstep import BarrierMember, Lockstep
from tests.support.waiting import PATIENCE
from troupe.workflow.backend import EndpointOptions


class World:
    """Calls that take a given number of passes of the event loop, and record their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    async def call(self, seat: BarrierMember, name: str, number: int, passes: int) -> None:
        async with seat.call():
            self.events.append(("begin", name, number))
            for _ in range(passes):
                await asyncio.sleep(0)
            self.events.append(("end", name, number))


def clock() -> TrajectoryClock:
    return TrajectoryClock(60, longest=60, patient=False)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=5))
def test_rounds_of_calls_do_not_overlap(plans: list[list[int]]) -> None:
    """For all durations and numbers of calls, a round begins when the last call has ended."""

    async def play() -> World:
        world, lockstep = World(), Lockstep()

        async def one(seat: BarrierMember, name: str, calls: Sequence[int]) -> None:
            for number, passes in enumerate(calls):
                await world.call(seat, name, number, passes)
            lockstep.leave(seat)

        # All are there before the first of them calls.
        seats = [lockstep.member(clock()) for _ in plans]
        for seat in seats:
            lockstep.join(seat)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(one(seats[n], f"t{n}", c) for n, c in enumerate(plans)))
        return world

    world = asyncio.run(play())
    assert sum(map(len, plans)) * 2 == len(world.events)
    rounds = [number for _, _, number in world.events]
    assert rounds == sorted(rounds)
    for number in set(rounds):
        there = {name for _, name, of in world.events if of == number}
        assert there == {f"t{n}" for n, calls in enumerate(plans) if len(calls) > number}


async def test_branches_of_a_trajectory_wait_for_each_other() -> None:
    world, lockstep = World(), Lockstep()
    other = asyncio.Event()

    async def slow() -> None:
        with lockstep.member(clock()) as seat:
            await other.wait()
            await world.call(seat, "slow", 0, 0)

    waiting = asyncio.create_task(slow())
    await asyncio.sleep(0)
    with lockstep.member(clock()) as seat:
        branches = [asyncio.create_task(world.call(seat, "b", n, n)) for n in range(3)]
        await asyncio.sleep(0.01)  # time to go on in; none may, however long this takes
        assert world.events == [], "nobody goes on without the slow one"
        other.set()
        await asyncio.gather(waiting, *branches)
    assert len(world.events) == 8
    # b2 ends last; had another branch called again, it would have waited for it.
    assert world.events[-1] == ("end", "b", 2)


@pytest.mark.parametrize("how", ["cancelled", "raises", "leaves"])
async def test_an_ended_trajectory_does_not_hold_up_the_barrier(how: str) -> None:
    lockstep, goes = Lockstep(), asyncio.Event()

    async def gone() -> None:
        with lockstep.member(clock()) as seat:
            if how == "cancelled":
                async with seat.call():
                    await asyncio.sleep(3600)
            await goes.wait()
            if how == "raises":
                raise ValueError

    async def stays() -> None:
        with lockstep.member(clock()) as seat:
            for _ in range(2):
                async with seat.call():
                    pass

    first = asyncio.create_task(gone())
    async with asyncio.timeout(PATIENCE):
        await asyncio.sleep(0)
        second = asyncio.create_task(stays())
        await asyncio.sleep(0.01)  # it waits for the first, however long this takes
        assert not second.done()
        goes.set()
        if how == "cancelled":
            first.cancel()
        await second
        await asyncio.gather(first, return_exceptions=True)


async def test_waiting_for_others_is_not_the_workflows_own_time() -> None:
    patient = TrajectoryClock(0.05, longest=60, patient=True)
    lockstep = Lockstep()
    with lockstep.member(clock()) as other, lockstep.member(patient) as seat:

        async def late() -> None:
            await asyncio.sleep(0.15)
            async with other.call():
                pass

        task = asyncio.create_task(late())
        async with seat.call():
            assert patient.left > 0
        await task


class _Engine:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def generate(self, *arguments: Any) -> str:
        self.asked.append(arguments)
        return "generated"

    async def invoke(self, *arguments: Any, **_: Any) -> str:
        self.asked.append(arguments)
        return "invoked"

    def endpoint(self, agent: Any, options: EndpointOptions) -> tuple[Any, EndpointOptions]:
        return agent, options


async def test_engines_and_tools_are_as_before() -> None:
    engine: Any = _Engine()
    with Lockstep().member(clock()) as seat:
        backend: Any = seat.backend(engine)
        assert await backend.generate("solver", [1], None) == "generated"
        assert await seat.tools(engine).invoke("add", "{}") == "invoked"
        options = EndpointOptions(lenient=True)
        assert backend.endpoint("solver", options) == ("solver", options)
    assert engine.asked == [("solver", [1], None), ("add", "{}")]
