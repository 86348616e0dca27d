"""Callers that request trajectories and leave, and the store's records of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import plays
from tests.rollout.house import House, evaluation, open_house, training
from tests.rollout.processes import ServiceProcess
from tests.support.waiting import until
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
RUNNING = common_pb.TRAJECTORY_STATE_RUNNING
SCORING = common_pb.TRAJECTORY_STATE_SCORING


async def test_every_move_of_a_trajectory_is_reported(house: House) -> None:
    await house.prepare("one_turn")
    states = [event.state async for event in house.stream(evaluation(1))]
    assert states == [RUNNING, SCORING, COMPLETED]
    endings = [event.state async for event in house.stream(evaluation(2), endings_only=True)]
    assert endings == [COMPLETED, COMPLETED]


async def test_events_of_the_same_time_come_together_where_the_caller_takes_them_so(
    house: House,
) -> None:
    await house.prepare("one_turn")
    stream = house.stream(evaluation(16), together=True)
    messages = [message async for message in stream]
    events = [event for first in messages for event in (first, *first.together)]
    assert len(messages) < len(events) == 48
    for ticket in evaluation(16):
        own = [event for event in events if event.trajectory_id == ticket.trajectory_id]
        assert [event.state for event in own] == [RUNNING, SCORING, COMPLETED]
        assert own[-1].turns


async def test_a_client_that_vanishes_takes_its_trajectories_with_it(house: House) -> None:
    await house.prepare("long_winded")
    await house.open_step()
    stream = house.stream(training())
    async for _ in stream:
        break
    assert len(house.service._runner) == 4
    stream.cancel()
    await until(lambda: len(house.service._runner) == 0)
    # Nothing of them is stored: they can be run again, here or elsewhere.
    assert not (await house.step()).ended_trajectory_ids
    assert {e.running for e in await engines(house)} == {0}
    ended = await house.run(training())
    assert {e.state for e in ended.values()} == {COMPLETED}
    assert (await house.step()).sealed


async def test_a_second_caller_joins_what_runs_and_keeps_it_alive(house: House) -> None:
    await house.prepare("waits")
    first = house.stream(evaluation(2))
    async for _ in first:
        break
    second = asyncio.create_task(house.run(evaluation(3)))
    await until(lambda: len(house.service._runner) == 3)
    first.cancel()
    await asyncio.sleep(0.1)  # time to end in; none may, however long this takes
    assert len(house.service._runner) == 3  # the second caller still listens
    plays.go_on()
    ended = await second
    assert {e.state for e in ended.values()} == {COMPLETED}
    assert {len(e.turns) for e in ended.values()} == {1}


async def test_releasing_a_job_ends_its_streams_without_storing_anything(house: House) -> None:
    await house.prepare("waits")
    await house.open_step()
    running = asyncio.create_task(house.run(training()))
    await until(lambda: len(house.service._runner) == 4)
    request = rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=house.job_id)
    await house.rollout.ReleaseJob(request)
    with pytest.raises(Unavailable, match="was cancelled"):
        await running
    assert not (await house.step()).ended_trajectory_ids


async def test_serial_mode_plays_one_query_at_a_time(house: House) -> None:
    await house.prepare("waits", pipeline={"mode": "serial"})
    await house.open_step()
    running = asyncio.create_task(house.run(training()))
    [job] = house.service._jobs.all()
    await until(lambda: job.gate._inside == 2)
    await asyncio.sleep(0.05)  # time to begin in; no other may, however long this takes
    assert job.gate._inside == 2
    plays.go_on()
    assert {e.state for e in (await running).values()} == {COMPLETED}


async def test_at_most_so_many_trajectories_run_at_once(house: House) -> None:
    await house.prepare("waits", limits={"max_concurrent_trajectories": 3})
    running = asyncio.create_task(house.run(evaluation(5)))
    [job] = house.service._jobs.all()
    await until(lambda: job.gate._inside == 3)
    await asyncio.sleep(0.05)  # time to begin in; no other may, however long this takes
    assert job.gate._inside == 3
    plays.go_on()
    assert len(await running) == 5


async def test_a_store_that_restarts_costs_time_and_nothing_else(
    tmp_path: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = ServiceProcess(
        "experience_store",
        tmp_path_factory.mktemp("own-store"),
        {"TROUPE_REDIS_URL": redis_url},
    )
    store.start()
    plays.RELEASED = asyncio.Event()
    try:
        async with open_house(tmp_path, store=store.address) as house:
            await house.prepare("waits")
            await house.open_step()
            running = asyncio.create_task(house.run(training()))
            await until(lambda: len(house.service._runner) == 4)
            store.kill()
            plays.go_on()
            await asyncio.sleep(0.3)  # how long the store is away; any time will do
            await asyncio.to_thread(store.start)
            ended = await running
            assert {e.state for e in ended.values()} == {COMPLETED}
            assert (await house.step()).sealed
    finally:
        store.stop()


async def test_a_step_that_is_not_open_fails_the_call(house: House) -> None:
    await house.prepare("one_turn")
    await house.open_step(step=0)
    with pytest.raises((FailedPrecondition, NotFound)):
        await house.run(training(step=7), step=7)


async def test_bad_tickets_are_refused_by_field(house: House) -> None:
    await house.prepare("one_turn")
    faults: list[tuple[str, dict[str, Any]]] = [
        ("tickets[1].query_id", {"query_id": ""}),
        ("tickets[1].trajectory_id", {"trajectory_id": ""}),
        ("tickets[1].split", {"split": ""}),
        ("tickets[1].index", {"index": -1}),
        ("tickets[1].purpose", {"purpose": rollout_pb.Ticket.PURPOSE_UNSPECIFIED}),
        ("tickets[1].trajectory_id", {"trajectory_id": "h0-e0-t0"}),
    ]
    for field, change in faults:
        tickets = evaluation(2)
        for name, value in change.items():
            setattr(tickets[1], name, value)
        with pytest.raises(InvalidArgument) as caught:
            await house.run(tickets)
        assert caught.value.field == field


async def test_the_heartbeat_tells_engines_and_work(house: House) -> None:
    beat = house.service._beat()
    assert (beat.kind, beat.doing) == (orchestrator_pb.WORKER_KIND_ROLLOUT, "idle")
    await house.prepare("waits")
    running = asyncio.create_task(house.run(evaluation(2)))
    await until(lambda: len(house.service._runner) == 2)
    beat = house.service._beat()
    assert beat.doing == "2 trajectories in flight"
    assert [e.policy for e in beat.engines] == ["big"]
    assert {e.worker_id for e in beat.engines} == {"w0"}
    plays.go_on()
    await running


async def engines(house: House) -> list[rollout_pb.EngineStatus]:
    response = await house.rollout.ListEngines(rollout_pb.ListEnginesRequest(job_id=house.job_id))
    return list(response.engines)
