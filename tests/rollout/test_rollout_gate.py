"""Limits on trajectories that run, or continue, at the same time, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.trajectories.concurrency import ConcurrencyGate, Turnstile
from tests.support.waiting import PATIENCE


async def test_the_gate_is_fair_and_bounded() -> None:
    gate = ConcurrencyGate(2)
    order: list[int] = []

    async def pass_through(n: int) -> None:
        async with gate.enter(f"q{n}"):
            assert gate._inside <= 2
            order.append(n)
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(pass_through(n)) for n in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 4, 5, 6, 7]
    assert gate._inside == 0


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_property_one_query_at_a_time(queries: list[int], limit: int) -> None:
    gate = ConcurrencyGate(limit, one_query=True)
    inside: Counter[int] = Counter()
    passed: list[int] = []

    async def pass_through(query: int) -> None:
        async with gate.enter(f"q{query}"):
            inside[query] += 1
            assert +inside == Counter({query: inside[query]})
            assert inside[query] <= limit
            await asyncio.sleep(0)
            inside[query] -= 1
            passed.append(query)

    async def play() -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(pass_through(query) for query in queries))

    asyncio.run(play())
    assert sorted(passed) == sorted(queries)


async def test_the_first_go_on_before_the_last_have_entered() -> None:
    gate = ConcurrencyGate(64)
    entered: list[int] = []
    went_on: list[int] = []

    async def pass_through(n: int) -> None:
        async with gate.enter(f"q{n}"):
            entered.append(n)
            await asyncio.sleep(0)
            went_on.append(len(entered))

    await asyncio.gather(*(pass_through(n) for n in range(64)))
    assert entered == list(range(64))
    # Some trajectories request turns while others have not even begun.
    assert went_on[0] < 32
    assert gate._inside == 0


async def test_trajectories_whose_turns_end_together_go_on_a_few_per_round_of_the_loop() -> None:
    turnstile = Turnstile()
    loop = asyncio.get_running_loop()
    went_on: list[int] = []
    seen = [0]  # how many had gone on, by round

    def look() -> None:
        seen.append(len(went_on))
        if seen[-1] < 99:
            loop.call_soon(look)

    async def end_turn(number: int) -> None:
        await turnstile.wait()
        went_on.append(number)

    tasks = [asyncio.create_task(end_turn(number)) for number in range(100)]
    loop.call_soon(look)
    await asyncio.sleep(0)
    tasks[50].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert went_on == [number for number in range(100) if number != 50]
    assert max(after - before for before, after in pairwise(seen)) <= 4
    # Later calls find it free.
    async with asyncio.timeout(PATIENCE):
        await turnstile.wait()


@pytest.mark.parametrize(
    ("each", "most"), [(0.001, 4), (0.01, 3), (0.035, 1)], ids=["short", "longer", "long"]
)
async def test_a_round_of_the_loop_ends_when_its_computing_is_spent(each: float, most: int) -> None:
    """`each`: seconds that a trajectory computes when it continues; `most` of them fit."""
    computed = 0.0
    turnstile = Turnstile(lambda: computed)
    loop = asyncio.get_running_loop()
    went_on: list[int] = []
    seen = [0]  # how many had gone on, by round

    def look() -> None:
        seen.append(len(went_on))
        if seen[-1] < 60:
            loop.call_soon(look)

    async def end_turn(number: int) -> None:
        nonlocal computed
        await turnstile.wait()
        went_on.append(number)
        computed += each

    loop.call_soon(look)
    await asyncio.gather(*(end_turn(number) for number in range(60)))
    assert went_on == list(range(60))
    rounds = [after - before for before, after in pairwise(seen)]
    assert 1 <= max(rounds) <= most
    assert rounds.count(0) <= 2  # those that wait are let in one round later
