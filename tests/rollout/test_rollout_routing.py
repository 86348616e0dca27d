"""The order and the engines of turns, by the job's routing."""

from __future__ import annotations

import asyncio

from services.rollout.engines.requests import DeviceSpeed
from services.rollout.prepared_job import OpenGroups
from services.rollout.serving.router import Backlog, PolicyRouter, StickyRoute
from tests.rollout.hand_engines import HandEngine, ask, drew, make, settle
from tests.support.waiting import until
from troupe.job import RoutingSpec
from troupe.v1 import common_pb2 as common_pb


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    router, engines = make(count=3, limit=8)
    home = StickyRoute()
    for n in range(4):
        task = ask(router, f"r{n}", home)
        await settle()
        next(e for e in engines if e.engine_id == home.engine_id).answer(f"r{n}")
        await task
    assert sorted(len(e.served) for e in engines) == [0, 0, 4]


async def test_a_long_conversation_waits_for_its_full_engine_but_not_for_a_lost_one() -> None:
    router, [first, second] = make(limit=2)
    home = StickyRoute()
    begins = ask(router, "c/0", home, prompt=4000)
    await settle()
    assert list(first.held) == ["c/0"]
    tasks = [ask(router, f"r{n}", prompt=4000) for n in range(3)]
    await settle()
    first.answer("c/0")
    await begins
    tasks.append(ask(router, "r3", prompt=4000))
    await settle()
    assert [len(one.held) for one in (first, second)] == [2, 2]
    second.answer(next(iter(second.held)))  # half of the first one's load, and a place
    waits = ask(router, "c/1", home, prompt=4000)
    await settle()
    assert (len(second.held), router.waiting) == (1, 1)
    waits.cancel()  # then it is not a load any more
    await asyncio.gather(waits, return_exceptions=True)
    assert router.waiting == 0
    waits = ask(router, "c/1", home, prompt=4000)
    await settle()
    assert (len(second.held), router.waiting) == (1, 1)
    first.answer(next(iter(first.held)))
    await settle()
    assert ("c/1" in first.held, router.waiting) == (True, 0)
    short = ask(router, "c/2", home, prompt=100)
    await settle()
    assert "c/2" in second.held  # prefilled again instantly
    second.answer("c/2")
    await short
    home.routed = next(one for one in router._routed.values() if one.engine is first)
    again = ask(router, "c/3", home, prompt=4000)
    await settle()
    assert router.waiting == 1
    first.die(drew(1, "abort"))
    router.wake()
    while not all(task.done() for task in (*tasks, waits, again)):
        for name in list(second.held):
            second.answer(name)
        await asyncio.sleep(0.001)
    assert "c/3" in second.served
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
    groups = OpenGroups([router])
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
    homes = [StickyRoute() for _ in range(4)]
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
    second.state = common_pb.ENGINE_STATE_DEAD
    second.die()
    first.answer("r2")
    await until(lambda: "r1~1" in first.held)
    first.answer("r1~1")
    await asyncio.gather(*tasks)


async def test_kinds_of_turns_go_to_the_devices_that_fit() -> None:
    engines = [
        HandEngine("c", device=DeviceSpeed("compute", 20_000, 1000)),
        HandEngine("b", device=DeviceSpeed("bandwidth", 5_000, 3000)),
    ]
    spec = RoutingSpec.model_validate({"affinity": {"domains": {"game": "compute"}}})
    router = PolicyRouter("p", engines, limit=8, spec=spec)  # type: ignore[arg-type]
    for n in range(6):
        task = ask(router, f"g{n}", domain="game", agent="player")
        await settle()
        engines[0].answer(f"g{n}", tokens=1)
        await task
    # The router learns that undeclared turns draw much for their prompts.
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
    engines[1].state = common_pb.ENGINE_STATE_DEAD
    instead = ask(router, "instead", domain="math", agent="solver")
    await settle()
    assert list(engines[0].held) == ["instead"]
    engines[0].answer("instead")
    engines[1].answer("last")
    await asyncio.gather(last, instead)
