"""The router with engines that a test moves by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.errors import BadTurn, PromptTooLong, TurnDeadline
from services.rollout.engines.requests import EngineResponse
from services.rollout.serving.router import Backlog, StickyRoute
from tests.rollout.hand_engines import HEALTHY, HandEngine, ask, make, settle
from tests.support.waiting import PATIENCE
from troupe.rpc.errors import AlreadyExists, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow import ContextOverflowError, TurnError


async def test_turns_spread_and_wait_beyond_the_limit() -> None:
    router, engines = make()
    tasks = [ask(router, f"r{n}") for n in range(6)]
    await settle()
    assert [len(e.held) for e in engines] == [2, 2]
    assert (router.in_flight, router.waiting) == (4, 2)
    while router.in_flight:
        for engine in engines:
            for request_id in list(engine.held):
                engine.answer(request_id)
        await settle()
    generations = await asyncio.gather(*tasks)
    assert all(e.most == 2 for e in engines)
    assert generations[0].queue_seconds >= 0.25  # the engine's own and the router's


async def test_first_come_first_served() -> None:
    router, [engine] = make(count=1, limit=1)
    tasks = [ask(router, f"r{n}") for n in range(5)]
    for n in range(5):
        await settle()
        engine.answer(f"r{n}")
    await asyncio.gather(*tasks)
    assert engine.served == [f"r{n}" for n in range(5)]


async def test_an_engine_that_returns_takes_the_waiting_turns() -> None:
    router, [engine] = make(count=1)
    engine.state = common_pb.ENGINE_STATE_STALE
    task = ask(router, "r")
    await settle()
    assert router.waiting == 1
    engine.state = HEALTHY
    router.wake()
    await settle()
    engine.answer("r")
    await task


async def test_a_cancelled_turn_leaves_queue_and_engine() -> None:
    router, [engine] = make(count=1, limit=1)
    held, waiting = ask(router, "held"), ask(router, "waiting")
    await settle()
    waiting.cancel()
    held.cancel()
    await asyncio.gather(held, waiting, return_exceptions=True)
    assert engine.cancelled == ["held"]
    assert (router.in_flight, router.waiting) == (0, 0)


async def test_deadlines_name_what_they_waited_for() -> None:
    router, [engine] = make(count=1, limit=1)
    held, late = ask(router, "held", seconds=60), ask(router, "late", seconds=0.05)
    with pytest.raises(TurnError, match=r"no free engine within 0\.05 s; 1 in flight") as caught:
        await late
    assert caught.value.kind == "deadline"
    engine.held["held"].set_exception(TurnDeadline("e0", "held", 5, 3))
    with pytest.raises(TurnError, match="was not generated within 60 s"):
        await held


@pytest.mark.parametrize(
    ("raised", "expected", "kind"),
    [
        (PromptTooLong("p", 400, 384), ContextOverflowError, "context_overflow"),
        (BadTurn("the prompt is empty"), TurnError, "bad_turn"),
    ],
)
async def test_a_turn_that_no_engine_can_serve_is_not_repeated(
    raised: Exception, expected: type[TurnError], kind: str
) -> None:
    router, [engine] = make(count=1)
    task = ask(router, "r")
    await settle()
    engine.held["r"].set_exception(raised)
    with pytest.raises(expected) as caught:
        await task
    assert caught.value.kind == kind
    assert engine.served == ["r"]


async def test_a_closed_router_refuses_everyone() -> None:
    router, [engine] = make(count=1, limit=1)
    held, waiting = ask(router, "held"), ask(router, "waiting")
    await settle()
    router.close("the job was released")
    for task in (waiting, ask(router, "new")):
        with pytest.raises(TurnError, match="the job was released"):
            await task
    engine.answer("held", "abort")
    with pytest.raises(TurnError, match="the job was released"):
        await held


async def test_an_added_engine_takes_the_waiting_turns() -> None:
    router, [first] = make(count=1, limit=1)
    tasks = [ask(router, f"r{n}") for n in range(3)]
    await settle()
    assert router.backlog == Backlog(waiting=2, in_flight=1, outstanding_tokens=60)
    second = HandEngine("late")
    router.add(second)  # type: ignore[arg-type]
    await settle()
    assert list(second.held) == ["r1"]
    assert router.backlog == Backlog(waiting=1, in_flight=2, outstanding_tokens=60)
    with pytest.raises(AlreadyExists, match="late"):
        router.add(second)  # type: ignore[arg-type]
    first.answer("r0")
    await settle()
    first.answer("r2")
    second.answer("r1")
    await asyncio.gather(*tasks)
    assert router.backlog == Backlog(0, 0, 0)


async def test_a_removed_engine_ends_its_turns_and_gets_no_more() -> None:
    router, [first, second] = make(limit=4)
    home = StickyRoute()
    held = ask(router, "held", home)
    await settle()
    assert home.engine_id == "e0"
    idle = StickyRoute(home.routed)
    router.remove("e0")
    assert home.engine_id is None
    others = [ask(router, f"r{n}", home if n == 0 else None) for n in range(5)]
    await settle()
    assert (len(second.held), router.waiting, list(first.held)) == (4, 1, ["held"])
    assert router.in_flight == 5
    first.answer("held")
    await held
    router.add(first)  # type: ignore[arg-type]
    # Back with other weights and an empty cache: it is no conversation's home.
    assert idle.engine_id is None
    await settle()
    assert list(first.held) == ["r4"]
    with pytest.raises(NotFound, match="nobody"):
        router.remove("nobody")
    for engine in (first, second):
        for request_id in list(engine.held):
            engine.answer(request_id)
    await asyncio.gather(*others)
    assert router.backlog == Backlog(0, 0, 0)


@given(
    st.lists(
        st.sampled_from(["ask", "answer", "abort", "die", "revive", "cancel", "wake", "move"]),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(["least_work", "least_work", "round_robin", "random_hash"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_property_no_turn_is_lost_and_no_limit_exceeded(
    moves: list[str], policy: str, rng: Any
) -> None:
    async def play() -> None:
        router, engines = make(count=3, limit=2, policy=policy, adaptive_limit=False)
        tasks: list[asyncio.Task[EngineResponse]] = []
        here = {engine.engine_id for engine in engines}
        for move in moves:
            busy = [(e, r) for e in engines for r, f in e.held.items() if not f.done()]
            if move == "ask":
                tasks.append(ask(router, f"r{len(tasks)}", seconds=60))
            elif move in ("answer", "abort") and busy:
                engine, request_id = rng.choice(busy)
                engine.answer(request_id, "stop" if move == "answer" else "abort")
            elif move == "die":
                rng.choice(engines).die()
            elif move == "revive":
                rng.choice(engines).state = HEALTHY
                router.wake()
            elif move == "cancel" and tasks:
                rng.choice(tasks).cancel()
            elif move == "wake":
                router.wake()
            elif move == "move":
                engine = rng.choice(engines)
                if engine.engine_id in here:
                    router.remove(engine.engine_id)
                else:
                    router.add(engine)
                here ^= {engine.engine_id}
            await settle()
            # An engine that left with two turns and came back is counted from zero.
            assert all(len(e.held) <= 2 for e in engines) or "move" in moves
        for engine in engines:
            engine.state = HEALTHY
            if engine.engine_id not in here:
                router.add(engine)  # type: ignore[arg-type]
        router.wake()
        async with asyncio.timeout(PATIENCE):
            while not all(task.done() for task in tasks):
                for engine in engines:
                    for request_id, future in engine.held.items():
                        if not future.done():
                            engine.answer(request_id)
                await asyncio.sleep(0.001)
        await settle()
        assert (router.in_flight, router.waiting) == (0, 0)
        outcomes = Counter("cancelled" if t.cancelled() else "done" for t in tasks)
        assert outcomes["done"] == sum(not t.cancelled() and t.exception() is None for t in tasks)

    asyncio.run(play())
