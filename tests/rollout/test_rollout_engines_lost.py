"""Engines that die, and weights that change, under running trajectories."""

from __future__ import annotations

import asyncio

import pytest

from tests.rollout.fragile import Workshop
from tests.rollout.house import House, evaluation
from tests.support.waiting import PATIENCE, until
from troupe.rpc import (
    NO_RETRY,
    ClientSettings,
    FailedPrecondition,
    NotFound,
    Unavailable,
    connect,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
HEALTHY = common_pb.ENGINE_STATE_HEALTHY
pytestmark = pytest.mark.usefixtures("quick_restarts")


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


async def test_an_engine_that_dies_mid_turn_comes_back_and_the_turn_is_repeated(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded")
    [engine] = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(4)))
    await until(lambda: engine.load().generated_tokens > 10)
    engine.pull_plug()
    ended = await running
    assert {e.state for e in ended.values()} == {COMPLETED}
    assert engine.restarts == 1
    assert (engine.state, engine.version) == (HEALTHY, 0)
    # From DEAD through STALE and a verified update: never back with unknown weights.
    assert engine.updates == [0, 0]


async def test_a_repeated_turn_draws_the_same_tokens_after_a_death(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded")
    undisturbed = await house.run(evaluation(3))
    [engine] = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(3)))
    await until(lambda: engine.load().running > 0)
    engine.pull_plug()
    for key, event in (await running).items():
        assert event.turns[0].response == undisturbed[key].turns[0].response


async def test_turns_go_to_the_replica_that_lives(house: House, workshop: Workshop) -> None:
    await house.prepare("long_winded", policies={"big": {"engine": {"replicas": 2}}})
    first, second = workshop.engines["big"]
    first.failing_starts = 1000
    running = asyncio.create_task(house.run(evaluation(6)))
    await until(lambda: first.load().running > 0 and second.load().running > 0)
    first.pull_plug()
    ended = await running
    assert {e.state for e in ended.values()} == {COMPLETED}
    assert second.load().generated_tokens > 0
    # An update does not wait for the dead one.
    response = await house.update(house.publish("big", 1))
    assert {e.engine_id: e.version for e in response.engines}[second.engine_id] == 1
    # Once it can start again it comes back with the newest weights.
    first.failing_starts = 0
    await until(lambda: first.state == HEALTHY)
    assert first.version == 1


async def test_without_any_engine_the_turn_ends_at_its_deadline_and_says_so(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("one_turn", limits={"turn_seconds": 0.5})
    [engine] = workshop.engines["big"]
    engine.failing_starts = 1000
    engine.pull_plug()
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_FAILED
    assert event.reason.startswith(
        "deadline: a turn of policy 'big' found no free engine within 0.5 s"
    )
    assert "DEAD (the plug was pulled)" in event.reason


async def test_an_engine_that_never_answers_ends_with_the_turn_or_the_trajectory(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("one_turn", limits={"turn_seconds": 0.4})
    workshop.engines["big"][-1].hanging = True
    event = await house.run_one()
    assert event.reason.startswith(
        "deadline: a turn of policy 'big' was not generated within 0.4 s; "
    )
    for seconds in (0.4, 4, 40):
        await house.prepare("one_turn", limits={"trajectory_seconds": seconds})
        engine = workshop.engines["big"][-1]
        engine.hanging = True
        event = await house.run_one()
        assert event.reason.startswith("deadline: ")
        assert engine.load().running + engine.load().waiting == 0
        if "waiting for its query" not in event.reason:  # as on a machine that is busy
            break
    # The trajectory's remaining time bounds the turn: either deadline may be named.
    assert "solver" in event.reason or "policy 'big'" in event.reason


async def test_updates_roll_over_the_replicas_under_load(house: House, workshop: Workshop) -> None:
    await house.prepare("long_winded", policies={"big": {"engine": {"replicas": 2}}})
    engines = workshop.engines["big"]
    for engine in engines:
        engine.update_delay = 0.05
    running = asyncio.create_task(house.run(evaluation(8)))
    await until(lambda: all(e.load().running > 0 for e in engines))
    for version in (1, 2):
        response = await house.update(house.publish("big", version))
        assert [e.version for e in response.engines] == [version] * 2
    ended = await running
    assert {e.state for e in ended.values()} == {COMPLETED}
    for event in ended.values():
        spans = event.turns[0].versions
        assert spans[0].start == 0
        assert spans[-1].end == event.turns[0].response_tokens
        assert [s.version for s in spans] == sorted(s.version for s in spans)
    assert max(s.version for e in ended.values() for s in e.turns[0].versions) == 2


async def test_an_update_is_idempotent_by_version(house: House, workshop: Workshop) -> None:
    await house.prepare("team")
    [engine] = workshop.engines["big"]
    ref = house.publish("big", 1)
    await asyncio.gather(house.update(ref), house.update(ref))
    await house.update(ref)
    assert engine.updates == [0, 1]
    assert workshop.engines["small"][0].updates == [0]


async def test_a_version_names_one_content_and_never_goes_back(house: House) -> None:
    await house.prepare("one_turn")
    ref = house.publish("big", 1)
    await house.update(ref)
    other = house.publish("big", 1, seed=99)
    with pytest.raises(FailedPrecondition) as caught:
        await house.update(other)
    assert caught.value.kind == "version_conflict"
    with pytest.raises(FailedPrecondition) as caught:
        await house.update(house.publish("big", 0))
    assert caught.value.kind == "version_stale"


async def test_weights_that_nobody_has_leave_the_policy_as_it_was(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("one_turn")
    ref = house.publish("big", 1)
    house.transfer.delete(ref.key)
    with pytest.raises(NotFound) as caught:
        await house.update(ref)
    assert (caught.value.kind, caught.value.field) == ("weights_not_found", "big")
    assert (await house.run_one()).state == COMPLETED
    assert workshop.engines["big"][0].version == 0
    await house.update(house.publish("big", 1))
    assert workshop.engines["big"][0].version == 1


async def test_an_engine_that_missed_an_update_serves_nothing_until_it_has_caught_up(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("one_turn", policies={"big": {"engine": {"replicas": 2}}})
    first = workshop.engines["big"][0]
    first.failing_updates = 2
    response = await house.update(house.publish("big", 1))
    assert {e.version for e in response.engines} == {0, 1}
    ended = await house.run(evaluation(4))
    assert {s.version for e in ended.values() for s in e.turns[0].versions} == {1}
    await until(lambda: first.version == 1)


async def test_an_update_that_fails_everywhere_is_reported_and_can_be_repeated(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("one_turn")
    [engine] = workshop.engines["big"]
    engine.failing_updates = 10**9  # however often the engine is tried
    ref = house.publish("big", 1)
    request = rollout_pb.UpdateWeightsRequest(request_id="u1", weights=ref)
    async with connect(house.address, ClientSettings(retry=NO_RETRY)) as channel:
        with pytest.raises(Unavailable, match="the link broke"):
            await rollout_grpc.RolloutStub(channel).UpdateWeights(request, timeout=PATIENCE)
    assert (await house.run_one()).state == COMPLETED
    engine.failing_updates = 0
    await house.update(ref)
    assert engine.version == 1
