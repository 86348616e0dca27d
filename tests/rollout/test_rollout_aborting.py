"""Trajectories that are aborted, dropped or carried over while they run."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import plays
from tests.rollout.house import House, evaluation, open_house, training
from tests.rollout.processes import ServiceProcess
from tests.support.waiting import PATIENCE, until
from troupe.rpc import InvalidArgument, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb

ABORTED = common_pb.TRAJECTORY_STATE_ABORTED
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
RUNNING = common_pb.TRAJECTORY_STATE_RUNNING


async def abort(house: House, *trajectory_ids: str, reason: str = "stale: too old") -> list[str]:
    request = rollout_pb.AbortTrajectoriesRequest(
        request_id=new_id("abort"),
        job_id=house.job_id,
        trajectory_ids=trajectory_ids,
        reason=reason,
    )
    response = await house.rollout.AbortTrajectories(request, timeout=PATIENCE)
    return list(response.aborted_trajectory_ids)


async def hold_open(house: House, step: int, *query_ids: str, group_size: int = 2) -> None:
    await house.store.CreateTables(
        store_pb.CreateTablesRequest(
            request_id=new_id("tables"), job_id=house.job_id, policies=["big"]
        )
    )
    await house.store.OpenStep(
        store_pb.OpenStepRequest(
            request_id=new_id("open"),
            job_id=house.job_id,
            step=step,
            versions={"big": 0},
            query_ids=query_ids,
            group_size=group_size,
            held_open=True,
        )
    )


async def amend(house: House, **changes: Any) -> None:
    request = store_pb.AmendStepRequest(request_id=new_id("amend"), job_id=house.job_id, **changes)
    await house.store.AmendStep(request)


async def test_aborted_trajectories_end_in_the_store_and_on_every_stream(house: House) -> None:
    await house.prepare("waits")
    await house.open_step()
    first = asyncio.create_task(house.run(training()))
    second = asyncio.create_task(house.run(training()))
    await until(lambda: len(house.service._runner) == 4)
    doomed = ["q0-s0-t0", "q1-s0-t1"]
    assert await abort(house, *doomed, "q9-s0-t0", "elsewhere") == doomed
    await until(lambda: len(house.service._runner) == 2)
    assert sorted((await house.step()).ended_trajectory_ids) == doomed
    assert await abort(house, *doomed) == []  # they have ended
    plays.go_on()
    for ended in (await first, await second):
        states = {name: (event.state, event.reason) for name, event in ended.items()}
        assert states == {
            "q0-s0-t0": (ABORTED, "stale: too old"),
            "q0-s0-t1": (COMPLETED, ""),
            "q1-s0-t0": (COMPLETED, ""),
            "q1-s0-t1": (ABORTED, "stale: too old"),
        }
    assert (await house.step()).sealed
    assert {s.trajectory_id for s in await house.samples("big")} == {"q0-s0-t1", "q1-s0-t0"}


async def test_trajectories_that_wait_for_a_place_are_aborted_too(house: House) -> None:
    await house.prepare("waits", limits={"max_concurrent_trajectories": 1})
    await house.open_step()
    running = asyncio.create_task(house.run(training()))
    [job] = house.service._jobs.all()
    await until(lambda: job.gate._inside == 1)
    waiting = ["q1-s0-t0", "q1-s0-t1"]
    assert await abort(house, *waiting) == waiting
    await until(lambda: len(house.service._runner) == 2)
    assert await abort(house, "q0-s0-t0") == ["q0-s0-t0"]  # its place goes to the next one
    plays.go_on()
    states = {name: event.state for name, event in (await running).items()}
    assert states.pop("q0-s0-t1") == COMPLETED
    assert set(states.values()) == {ABORTED}
    assert (await house.step()).sealed


async def test_a_turn_that_is_generated_is_dropped_and_its_tokens_are_counted(
    house: House,
) -> None:
    await house.prepare("team")
    await house.open_step(queries=1, group_size=1)
    [policy] = [p for p in house.service._jobs.all()[0].policies.values() if p.name == "small"]
    policy.router._may_serve = lambda engine: False  # the second turn waits for an engine
    running = asyncio.create_task(house.run(training(1, 1)))
    await until(lambda: policy.router.waiting == 1)
    await abort(house, "q0-s0-t0")
    [event] = (await running).values()
    assert event.state == ABORTED
    assert event.metrics["response_tokens"] == event.turns[0].response_tokens > 0
    assert policy.router.waiting == 0
    assert dict(event.start_versions) == {"big": 0}


async def test_an_aborted_evaluation_tells_no_store(tmp_path: Path) -> None:
    plays.RELEASED = asyncio.Event()
    async with open_house(tmp_path) as house:  # there is no store
        await house.prepare("waits")
        running = asyncio.create_task(house.run(evaluation(2)))
        await until(lambda: len(house.service._runner) == 2)
        assert await abort(house, "h0-e0-t0", reason="") == ["h0-e0-t0"]
        plays.go_on()
        ended = await running
        assert (ended["h0-e0-t0"].state, ended["h0-e0-t0"].reason) == (ABORTED, "aborted")
        assert ended["h1-e0-t0"].state == COMPLETED
        with pytest.raises(InvalidArgument, match="job_id"):
            await house.rollout.AbortTrajectories(rollout_pb.AbortTrajectoriesRequest())


async def test_an_abort_outlives_a_restart_of_the_store(
    tmp_path: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("own-store")
    store = ServiceProcess("experience_store", directory, {"TROUPE_REDIS_URL": redis_url})
    store.start()
    plays.RELEASED = asyncio.Event()
    try:
        async with open_house(tmp_path, store=store.address) as house:
            await house.prepare("waits")
            await house.open_step(queries=1)
            running = asyncio.create_task(house.run(training(1)))
            await until(lambda: len(house.service._runner) == 2)
            store.kill()
            ids = ["q0-s0-t0", "q0-s0-t1"]
            assert await abort(house, *ids) == ids
            assert await abort(house, *ids) == ids  # on their way, once
            # The store is away, so that none ends, however long this takes.
            await asyncio.sleep(0.3)
            assert len(house.service._runner) == 2
            await asyncio.to_thread(store.start)
            assert {e.state for e in (await running).values()} == {ABORTED}
            assert (await house.step()).sealed
    finally:
        store.stop()


async def test_trajectories_that_the_store_dropped_end_as_aborted(house: House) -> None:
    await house.prepare("waits")
    await hold_open(house, 0, "q0", "q1")
    running = asyncio.create_task(house.run(training()))
    await until(lambda: len(house.service._runner) == 4)
    await amend(house, step=0, drop_query_ids=["q1"], drop_reason="surplus", close=True)
    plays.go_on()  # this worker was not told
    ended = await running
    assert {ended[f"q0-s0-t{n}"].state for n in (0, 1)} == {COMPLETED}
    assert {ended[f"q1-s0-t{n}"].state for n in (0, 1)} == {ABORTED}
    assert ended["q1-s0-t0"].reason == "surplus"
    assert (await house.step()).sealed
    assert {s.query_id for s in await house.samples("big")} == {"q0"}


async def test_a_carried_query_completes_in_the_later_step(house: House) -> None:
    await house.prepare("waits")
    await hold_open(house, 0, "q0", "q1")
    await hold_open(house, 1, "q2")
    running = asyncio.create_task(house.run(training()))
    await until(lambda: len(house.service._runner) == 4)
    await amend(house, step=0, carry_query_ids=["q1"], carry_to=1, close=True)
    plays.go_on()
    assert {e.state for e in (await running).values()} == {COMPLETED}
    assert (await house.step(0)).sealed
    assert sorted((await house.step(1)).ended_trajectory_ids) == ["q1-s0-t0", "q1-s0-t1"]


async def test_start_versions_are_reported_at_once_to_listeners_that_bound_staleness(
    house: House,
) -> None:
    await house.prepare("team", pipeline={"mode": "async"})
    await house.update(house.publish("big", 1))
    await house.update(house.publish("big", 2))
    await house.update(house.publish("small", 1))
    told = [{"big": 2}, {"big": 2, "small": 1}]
    for endings_only in (False, True):
        stream = house.stream(evaluation(1), endings_only=endings_only)
        events = [event async for event in stream]
        running = [dict(event.start_versions) for event in events if event.state == RUNNING]
        assert running == (told if endings_only else [{}, *told])
        assert dict(events[-1].start_versions) == {"big": 2, "small": 1}


async def test_a_trajectory_aborted_at_its_start_ends_in_the_store(
    house: House,
) -> None:
    await house.prepare("waits")
    await house.open_step()
    runner = house.service._runner
    tickets = training(queries=1)
    listener = await runner.listen(house.service._jobs.get(house.job_id), 0, tickets)
    # In the same turn of the event loop: its task has not begun.
    assert runner.abort(house.job_id, [tickets[0].trajectory_id], "stale: too old")
    await until(lambda: len(runner) == 1)
    assert (await house.step()).ended_trajectory_ids == [tickets[0].trajectory_id]
    plays.go_on()
    ended = {}
    async with asyncio.timeout(PATIENCE):
        async for bundle in listener.bundles():
            ended.update({event.trajectory_id: event.state for event in bundle})
    assert ended == {tickets[0].trajectory_id: ABORTED, tickets[1].trajectory_id: COMPLETED}


async def test_a_listener_of_a_released_job_gets_an_error(house: House) -> None:
    await house.prepare("waits")
    runner = house.service._runner
    job = house.service._jobs.get(house.job_id)
    listener = await runner.listen(job, 0, evaluation(2))
    async with asyncio.timeout(PATIENCE):
        await runner.cancel(house.job_id)  # in the same turn of the event loop
        assert len(runner) == 0  # otherwise a repeated request would wait forever
        with pytest.raises(Unavailable, match="was cancelled"):
            async for _ in listener.bundles():
                pass


async def test_many_trajectories_are_started_a_few_per_round_of_the_event_loop(
    house: House,
) -> None:
    await house.prepare("waits")
    runner = house.service._runner
    job = house.service._jobs.get(house.job_id)
    loop = asyncio.get_running_loop()
    asking = asyncio.create_task(runner.listen(job, 0, evaluation(100)))
    seen = [0]  # how many had been started, by round

    def look() -> None:
        seen.append(len(runner))
        if seen[-1] < 100:
            loop.call_soon(look)

    loop.call_soon(look)
    listener = await asking
    await asyncio.sleep(0)
    assert seen[-1] == 100
    assert max(after - before for before, after in pairwise(seen)) <= 16
    listener.close()
    # A job that is released while they are started gets no more of them.
    asking = asyncio.create_task(runner.listen(job, 0, evaluation(100)))
    while len(runner) < 20:  # noqa: ASYNC110 - nothing announces a start
        await asyncio.sleep(0)
    await runner.cancel(house.job_id)
    listener = await asking
    assert len(runner) <= 16, "the part that was being started"
    with pytest.raises(Unavailable, match="was cancelled"):
        async for _ in listener.bundles():
            pass
    assert len(runner) == 0
    # Neither does one whose caller has gone.
    asking = asyncio.create_task(runner.listen(job, 0, evaluation(100)))
    while len(runner) < 20:  # noqa: ASYNC110 - nothing announces a start
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(runner) == 0
