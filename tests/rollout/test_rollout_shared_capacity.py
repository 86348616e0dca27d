"""Routers of several policies whose engines stand on one host."""

from __future__ import annotations

import asyncio

from services.rollout.engines.hosts import EngineHost
from services.rollout.serving.router import PolicyRouter
from tests.rollout.hand_engines import HEALTHY, HandEngine, ask, settle


def team(count: int, limit: int) -> list[tuple[PolicyRouter, HandEngine]]:
    """Routers of policies with one engine each, all on one host."""
    host, made = EngineHost("h"), []
    for number in range(count):
        engine = HandEngine(f"e{number}")
        engine.host = host
        made.append((PolicyRouter(f"p{number}", [engine], limit=limit), engine))
    return made


async def test_the_limit_is_of_the_host_and_idle_policies_lend_their_places() -> None:
    (one, first), (other, second) = team(2, limit=4)
    tasks = [ask(one, f"a{n}") for n in range(6)]
    await settle()
    assert (len(first.held), one.waiting) == (4, 2)
    tasks += [ask(other, f"b{n}") for n in range(2)]
    await settle()
    assert (len(second.held), other.waiting) == (0, 2)
    # Each of two equal claims gets every second place.
    first.answer("a0")
    first.answer("a1")
    await settle()
    assert (len(first.held), len(second.held)) == (3, 1)
    while not all(task.done() for task in tasks):
        for engine in (first, second):
            for name in list(engine.held):
                engine.answer(name)
        await settle()
        assert len(first.held) + len(second.held) <= 4
    assert await asyncio.gather(*tasks)
    # Room that another policy made is seen by one that asks later.
    late = ask(other, "c")
    await settle()
    second.answer("c")
    await late


async def test_a_policy_without_a_serving_engine_holds_up_nobody() -> None:
    (one, first), (other, second) = team(2, limit=1)
    begun = ask(one, "a0")
    await settle()
    second.die()
    tasks = [ask(one, "a1"), ask(other, "b0")]
    await settle()
    first.answer("a0")
    await settle()
    assert list(first.held) == ["a1"]
    first.answer("a1")
    await asyncio.gather(begun, tasks[0])
    second.state = HEALTHY
    other.wake()
    await settle()
    assert list(second.held) == ["b0"]
    second.answer("b0")
    await tasks[1]


async def test_places_of_a_removed_engine_come_back() -> None:
    (one, first), (other, second) = team(2, limit=1)
    leaving = ask(one, "a0")
    await settle()
    one.remove("e0")
    waits = ask(other, "b0")
    await settle()
    assert not second.held
    first.answer("a0")
    await leaving
    await settle()
    assert list(second.held) == ["b0"]
    second.answer("b0")
    await waits
