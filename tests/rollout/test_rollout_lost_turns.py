"""Turns whose engine was lost continue from their tokens, start over or are cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from services.rollout.engines.errors import PromptTooLong
from services.rollout.engines.requests import VersionSpan
from services.rollout.serving.router import Backlog, Losses, StickyRoute
from tests.rollout.hand_engines import TEN, ask, drew, make, settle
from tests.support.waiting import PATIENCE, until


async def test_turns_of_a_dead_engine_go_on_elsewhere() -> None:
    router, engines = make(limit=8)
    lost: list[str] = []
    router.on_lost = lost.append
    tasks = [ask(router, f"r{n}") for n in range(6)]
    await settle()
    engines[0].die()
    await until(lambda: len(engines[1].held) == 6)
    assert set(lost) == {"e0"}
    for request_id in list(engines[1].held):
        engines[1].answer(request_id)
    assert len(await asyncio.gather(*tasks)) == 6


async def test_an_aborted_turn_goes_on_from_its_tokens() -> None:
    router, [first, second] = make()
    task = ask(router, "r")
    await settle()
    first.answer("r", "abort", tokens=3, version=4)
    await settle()
    # Its prefix is cached there, and the engine serves.
    prompt, sampling = first.asked["r~1"]
    assert prompt == [1] * 10 + [20, 21, 22]
    assert sampling == replace(TEN, max_new_tokens=7, drawn=3)
    first.die(drew(2, "abort", version=4))
    await settle()
    prompt, sampling = second.asked["r~2"]
    assert prompt == [1] * 10 + [20, 21, 22, 20, 21]
    assert sampling == replace(TEN, max_new_tokens=5, drawn=5)
    second.answer("r~2", tokens=1, version=5)
    generation = await task
    assert generation.token_ids == [20, 21, 22, 20, 21, 20]
    assert generation.logprobs == [0, -1, -2, 0, -1, 0]
    assert generation.versions == [VersionSpan(4, 0, 5), VersionSpan(5, 5, 6)]
    assert generation.finish_reason == "stop"
    assert generation.generate_seconds == 3
    assert router.take_losses() == Losses(resumed_turns=2, resumed_tokens=5)
    assert router.take_losses() == Losses()
    assert router.backlog == Backlog(0, 0, 0)


async def test_a_turn_whose_tokens_are_lost_with_its_engine_starts_over() -> None:
    router, [first, second] = make()
    task = ask(router, "r")
    await settle()
    first.die()
    await until(lambda: "r~1" in second.asked)
    assert second.asked["r~1"] == ([1] * 10, TEN)
    second.answer("r~1")
    assert (await task).token_ids == [20, 21]
    assert router.take_losses() == Losses(restarted_turns=1)


async def test_a_turn_of_a_deterministic_job_always_starts_over() -> None:
    router, [engine] = make(count=1, resume=False)
    task = ask(router, "r")
    await settle()
    engine.answer("r", "abort", tokens=3)
    await until(lambda: "r~1" in engine.asked)
    assert engine.asked["r~1"] == ([1] * 10, TEN)
    engine.answer("r~1")
    assert (await task).token_ids == [20, 21]
    assert router.take_losses() == Losses(restarted_turns=1)


async def test_a_lost_turn_that_cannot_grow_is_cut() -> None:
    router, [engine] = make(count=1)
    full, long = ask(router, "full"), ask(router, "long")
    await settle()
    engine.answer("full", "abort", tokens=10)  # as many as requested
    engine.answer("long", "abort", tokens=5)
    generation = await full
    assert (len(generation.token_ids), generation.finish_reason) == (10, "length")
    engine.held["long~1"].set_exception(PromptTooLong("p", 15, 15))  # its context is full
    generation = await long
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")


async def test_an_engine_that_dies_with_the_last_token_drawn_has_ended_the_turn() -> None:
    router, [first, second] = make()
    said, cut = ask(router, "said"), ask(router, "cut", home=StickyRoute())
    await settle()
    holders = {name: next(e for e in (first, second) if name in e.held) for name in ("said", "cut")}
    holders["said"].die(drew(3, "stop", version=4))
    holders["cut"].die(drew(5, "length"))  # no room was left
    generation = await asyncio.wait_for(said, PATIENCE)
    assert (generation.token_ids, generation.finish_reason) == ([20, 21, 22], "stop")
    assert generation.versions == [VersionSpan(4, 0, 3)]
    generation = await asyncio.wait_for(cut, PATIENCE)
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")
    assert router.take_losses() == Losses()
    assert router.backlog == Backlog(0, 0, 0)
