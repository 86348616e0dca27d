"""The router with engines that a test moves by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.base import Device, Generation, SamplingParams, VersionSpan
from services.rollout.engines.errors import (
    BadTurn,
    EngineDied,
    PromptTooLong,
    TurnDeadline,
    lost_turn,
)
from services.rollout.gate import Gate
from services.rollout.groups import Groups
from services.rollout.router import Backlog, Home, Losses, PolicyRouter
from troupe.job import RoutingSpec
from troupe.rpc.errors import AlreadyExists, NotFound
from troupe.v1 import common_pb2 as pb
from troupe.workflow import ContextOverflowError, TurnError

HEALTHY = pb.ENGINE_STATE_HEALTHY
TEN = SamplingParams(max_new_tokens=10)


@dataclass
class HandEngine:
    """Answers when told to; knows what it was given."""

    engine_id: str
    policy: str = "p"
    state: pb.EngineState.ValueType = HEALTHY
    message: str = ""
    device: Device = field(default_factory=Device)
    asked: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    held: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    most: int = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        deadline_seconds: float,
    ) -> Generation:
        self.held[request_id] = asyncio.get_running_loop().create_future()
        self.asked[request_id] = (prompt_ids, sampling)
        self.most = max(self.most, len(self.held))
        self.served.append(request_id)
        try:
            return await self.held[request_id]  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            del self.held[request_id]

    def answer(
        self, request_id: str, reason: Any = "stop", tokens: int = 2, version: int = 0
    ) -> None:
        self.held[request_id].set_result(drew(tokens, reason, version))

    def die(self, drawn: Generation | None = None) -> None:
        self.state = pb.ENGINE_STATE_DEAD
        self.message = "it was told to"
        for future in self.held.values():
            if not future.done():
                error = EngineDied(self.engine_id, self.message)
                future.set_exception(lost_turn(error, drawn) if drawn else error)


def drew(tokens: int, reason: Any, version: int = 0) -> Generation:
    spans = [VersionSpan(version, 0, tokens)] if tokens else []
    return Generation(
        list(range(20, 20 + tokens)), [-float(n) for n in range(tokens)], spans, reason, 0, 0.25, 1
    )


def make(
    count: int = 2, limit: int = 2, *, resume: bool = True, **routing: Any
) -> tuple[PolicyRouter, list[HandEngine]]:
    engines = [HandEngine(f"e{i}") for i in range(count)]
    spec = RoutingSpec.model_validate(routing)
    router = PolicyRouter("p", engines, limit=limit, spec=spec, resume=resume)  # type: ignore[arg-type]
    return router, engines


def ask(
    router: PolicyRouter,
    name: str,
    home: Home | None = None,
    seconds: float = 5,
    **kind: Any,
) -> asyncio.Task[Generation]:
    return asyncio.create_task(
        router.generate(name, [1] * 10, TEN, home=home or Home(), deadline_seconds=seconds, **kind)
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


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


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    router, engines = make(count=3, limit=8)
    home = Home()
    for n in range(4):
        task = ask(router, f"r{n}", home)
        await settle()
        next(e for e in engines if e.engine_id == home.engine_id).answer(f"r{n}")
        await task
    assert sorted(len(e.served) for e in engines) == [0, 0, 4]


async def test_turns_of_a_dead_engine_go_on_elsewhere() -> None:
    router, engines = make(limit=8)
    lost: list[str] = []
    router.on_lost = lost.append
    tasks = [ask(router, f"r{n}") for n in range(6)]
    await settle()
    engines[0].die()
    await asyncio.sleep(0.1)
    assert set(lost) == {"e0"}
    assert len(engines[1].held) == 6
    for request_id in list(engines[1].held):
        engines[1].answer(request_id)
    assert len(await asyncio.gather(*tasks)) == 6


async def test_an_engine_that_comes_back_takes_what_waits() -> None:
    router, [engine] = make(count=1)
    engine.state = pb.ENGINE_STATE_STALE
    task = ask(router, "r")
    await settle()
    assert router.waiting == 1
    engine.state = HEALTHY
    router.wake()
    await settle()
    engine.answer("r")
    await task


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


async def test_a_turn_of_which_nothing_is_handed_over_starts_over() -> None:
    router, [first, second] = make()
    task = ask(router, "r")
    await settle()
    first.die()
    await asyncio.sleep(0.1)
    assert second.asked["r~1"] == ([1] * 10, TEN)
    second.answer("r~1")
    assert (await task).token_ids == [20, 21]
    assert router.take_losses() == Losses(restarted_turns=1)


async def test_a_turn_of_a_deterministic_job_always_starts_over() -> None:
    router, [engine] = make(count=1, resume=False)
    task = ask(router, "r")
    await settle()
    engine.answer("r", "abort", tokens=3)
    await asyncio.sleep(0.1)
    assert engine.asked["r~1"] == ([1] * 10, TEN)
    engine.answer("r~1")
    assert (await task).token_ids == [20, 21]
    assert router.take_losses() == Losses(restarted_turns=1)


async def test_a_lost_turn_that_cannot_grow_is_cut() -> None:
    router, [engine] = make(count=1)
    full, long = ask(router, "full"), ask(router, "long")
    await settle()
    engine.answer("full", "abort", tokens=10)  # as many as were asked for
    engine.answer("long", "abort", tokens=5)
    generation = await full
    assert (len(generation.token_ids), generation.finish_reason) == (10, "length")
    engine.held["long~1"].set_exception(PromptTooLong("p", 15, 15))  # its context is full
    generation = await long
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")


async def test_an_engine_that_dies_with_the_last_token_drawn_has_ended_the_turn() -> None:
    router, [first, second] = make()
    said, cut = ask(router, "said"), ask(router, "cut", home=Home())
    await settle()
    holders = {name: next(e for e in (first, second) if name in e.held) for name in ("said", "cut")}
    holders["said"].die(drew(3, "stop", version=4))
    holders["cut"].die(drew(5, "length"))  # there was no room for more
    generation = await asyncio.wait_for(said, 1)
    assert (generation.token_ids, generation.finish_reason) == ([20, 21, 22], "stop")
    assert generation.versions == [VersionSpan(4, 0, 3)]
    generation = await asyncio.wait_for(cut, 1)
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")
    assert router.take_losses() == Losses()
    assert router.backlog == Backlog(0, 0, 0)


async def test_turns_of_nearly_finished_groups_go_first() -> None:
    router, [engine] = make(count=1, limit=1)
    lefts = {"r0": 0, "r1": 7, "r2": 3, "r3": 5, "r4": 1}
    tasks = [ask(router, name, group=f"q{name}", left=left) for name, left in lefts.items()]
    await settle()
    router.regroup("qr1", 2)  # five of its trajectories have ended meanwhile
    while engine.held:
        for name in list(engine.held):
            engine.answer(name)
        await settle()
    await asyncio.gather(*tasks)
    assert engine.served == ["r0", "r4", "r1", "r2", "r3"]


async def test_a_group_becomes_urgent_as_its_trajectories_end() -> None:
    router, [engine] = make(count=1, limit=1)
    groups = Groups([router])
    for query, count in {"a": 2, "b": 5}.items():
        for _ in range(count):
            groups.begin(query)
    tasks = [
        ask(router, name, group=name[0], left=groups.left(name[0])) for name in ("held", "a0", "b0")
    ]
    await settle()
    for _ in range(4):
        groups.end("b")
    assert (groups.left("a"), groups.left("b")) == (2, 1)
    for name in ("held", "b0", "a0"):
        engine.answer(name)
        await settle()
    await asyncio.gather(*tasks)
    groups.end("b")
    assert groups.left("b") == 0


async def test_static_routing_waits_for_its_engine_while_another_is_idle() -> None:
    router, [first, second] = make(limit=1, policy="round_robin")
    homes = [Home() for _ in range(4)]
    tasks = [ask(router, f"t{n}/0", homes[n]) for n in range(4)]
    await settle()
    assert (list(first.held), list(second.held)) == (["t0/0"], ["t1/0"])
    second.answer("t1/0")
    await settle()
    second.answer("t3/0")
    await settle()
    assert (list(second.held), router.waiting) == ([], 1)  # t2 waits for the first
    again = ask(router, "t2/1", homes[2])
    await settle()
    assert router.waiting == 2
    first.die(drew(1, "abort"))  # until that is gone
    router.wake()
    while not all(task.done() for task in (*tasks, again)):
        for name in list(second.held):
            second.answer(name)
        await asyncio.sleep(0.001)
    assert router.backlog == Backlog(0, 0, 0)


async def test_without_stickiness_too_a_turn_waits_for_the_engine_that_it_was_given() -> None:
    router, [first, second] = make(limit=1, policy="round_robin", sticky=False)
    tasks = [ask(router, f"r{n}") for n in range(3)]
    await settle()
    assert (list(first.held), list(second.held), router.waiting) == (["r0"], ["r1"], 1)
    first.answer("r0")
    await settle()
    assert list(first.held) == ["r2"], "it has room, and the turn is its"
    second.state = pb.ENGINE_STATE_DEAD
    second.die()
    first.answer("r2")
    await asyncio.sleep(0.1)
    first.answer("r1~1")
    await asyncio.gather(*tasks)


async def test_kinds_of_turns_go_to_the_devices_that_fit() -> None:
    engines = [
        HandEngine("c", device=Device("compute", 20_000, 1000)),
        HandEngine("b", device=Device("bandwidth", 5_000, 3000)),
    ]
    spec = RoutingSpec.model_validate({"affinity": {"domains": {"game": "compute"}}})
    router = PolicyRouter("p", engines, limit=8, spec=spec)  # type: ignore[arg-type]
    for n in range(6):
        task = ask(router, f"g{n}", domain="game", agent="player")
        await settle()
        engines[0].answer(f"g{n}", tokens=1)
        await task
    # Of what is declared nowhere the router learns that it draws much for what it reads.
    for n in range(20):
        task = ask(router, f"m{n}", domain="math", agent="solver")
        await settle()
        [engine] = [e for e in engines if e.held]
        engine.answer(f"m{n}", tokens=10)
        await task
    last = ask(router, "last", domain="math", agent="solver")
    for n in range(6, 9):
        router_tasks = ask(router, f"g{n}", domain="game", agent="player")
        await settle()
        engines[0].answer(f"g{n}", tokens=1)
        await router_tasks
    assert list(engines[1].held) == ["last"]
    engines[1].state = pb.ENGINE_STATE_DEAD
    instead = ask(router, "instead", domain="math", agent="solver")
    await settle()
    assert list(engines[0].held) == ["instead"]
    engines[0].answer("instead")
    engines[1].answer("last")
    await asyncio.gather(last, instead)


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
    held, late = ask(router, "held"), ask(router, "late", seconds=0.05)
    with pytest.raises(TurnError, match=r"no free engine within 0\.05 s; 1 in flight") as caught:
        await late
    assert caught.value.kind == "deadline"
    engine.held["held"].set_exception(TurnDeadline("e0", "held", 5, 3))
    with pytest.raises(TurnError, match="was not generated within 5 s"):
        await held


@pytest.mark.parametrize(
    ("raised", "expected", "kind"),
    [
        (PromptTooLong("p", 400, 384), ContextOverflowError, "context_overflow"),
        (BadTurn("the prompt is empty"), TurnError, "bad_turn"),
    ],
)
async def test_what_no_engine_can_serve_is_not_repeated(
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


async def test_an_engine_that_is_added_takes_what_waits() -> None:
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
    home = Home()
    held = ask(router, "held", home)
    await settle()
    assert home.engine_id == "e0"
    idle = Home(home.slot)
    router.remove("e0")
    assert home.engine_id is None
    others = [ask(router, f"r{n}", home if n == 0 else None) for n in range(5)]
    await settle()
    assert (len(second.held), router.waiting, list(first.held)) == (4, 1, ["held"])
    assert router.in_flight == 5
    first.answer("held")
    await held
    router.add(first)  # type: ignore[arg-type]
    # Back with other weights and an empty cache: it is nobody's home.
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
        tasks: list[asyncio.Task[Generation]] = []
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
            # An engine that left with two turns and came back is counted anew.
            assert all(len(e.held) <= 2 for e in engines) or "move" in moves
        for engine in engines:
            engine.state = HEALTHY
            if engine.engine_id not in here:
                router.add(engine)  # type: ignore[arg-type]
        router.wake()
        async with asyncio.timeout(10):
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


async def test_the_gate_is_fair_and_bounded() -> None:
    gate = Gate(2)
    order: list[int] = []

    async def pass_through(n: int) -> None:
        async with gate.enter(f"q{n}"):
            assert gate.inside <= 2
            order.append(n)
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(pass_through(n)) for n in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 4, 5, 6, 7]
    assert gate.inside == 0


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_property_one_query_at_a_time(queries: list[int], limit: int) -> None:
    gate = Gate(limit, one_query=True)
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
        async with asyncio.timeout(5):
            await asyncio.gather(*(pass_through(query) for query in queries))

    asyncio.run(play())
    assert sorted(passed) == sorted(queries)
