"""Engines that change their policy under running trajectories."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from services.rollout.engines import base
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.errors import UpdateFailed
from tests.rollout.fragile import FragileEngine, Workshop
from tests.rollout.house import House, evaluation, make_spec, model_path
from tests.support.waiting import PATIENCE, until
from troupe.job import PolicySpec
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError, new_id
from troupe.states import IllegalTransition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

pytestmark = pytest.mark.usefixtures("quick_restarts")
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
HEALTHY = common_pb.ENGINE_STATE_HEALTHY
TWO: dict[str, Any] = {"policies": {"big": {"engine": {"replicas": 2}}}}
# The policies' engines differ: one comes to serve the other only anew.
UNLIKE: dict[str, Any] = {
    "policies": {"big": {"engine": {"replicas": 2}}, "small": {"engine": {"max_context": 320}}}
}


class Made(Workshop):
    """A workshop whose next engines of a policy do not start."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Counter[str] = Counter()

    def __call__(
        self, engine_id: str, policy_name: str, policy_spec: PolicySpec, **how: Any
    ) -> FragileEngine:
        engine = super().__call__(engine_id, policy_name, policy_spec, **how)
        engine.failing_starts = self.broken.pop(policy_name, 0)
        return engine


@pytest.fixture
def workshop() -> Made:
    return Made()


async def move(
    house: House, engine: ServingEngine | str, policy: str, **how: Any
) -> rollout_pb.MoveEngineResponse:
    request = rollout_pb.MoveEngineRequest(
        request_id=new_id("move"),
        job_id=house.job_id,
        engine_id=engine if isinstance(engine, str) else engine.engine_id,
        policy=policy,
        **how,
    )
    return await house.rollout.MoveEngine(request, timeout=PATIENCE)  # type: ignore[no-any-return]


async def listed(house: House) -> dict[str, tuple[str, int]]:
    """Return the policy and state of every engine; no engine may be listed twice."""
    reply = await house.rollout.ListEngines(rollout_pb.ListEnginesRequest(job_id=house.job_id))
    ids = [engine.engine_id for engine in reply.engines]
    assert len(ids) == len(set(ids)) == 3
    serving = Counter(e.policy for e in reply.engines if e.state == HEALTHY)
    assert {load.policy: load.engines for load in reply.loads} == {
        policy: serving[policy] for policy in ("big", "small")
    }
    return {engine.engine_id: (engine.policy, engine.state) for engine in reply.engines}


async def refusal(house: House, *args: Any, **how: Any) -> TroupeError:
    with pytest.raises(TroupeError) as caught:
        await move(house, *args, **how)
    return caught.value


async def test_an_engine_moves_under_load_and_nothing_is_lost(house: House, workshop: Made) -> None:
    await house.prepare("team", **TWO)
    await house.update(house.publish("small", 1, seed=2))
    first, second = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(16)))
    await until(lambda: second.load().generated_tokens > 0)
    moved = await move(house, second, "small")
    assert (moved.source, moved.engine.policy, moved.engine.state) == ("big", "small", HEALTHY)
    assert not moved.rebuilt
    assert moved.seconds >= moved.drain_seconds >= 0
    ended = await running
    assert {event.state for event in ended.values()} == {COMPLETED}
    assert len(ended) == 16
    small = workshop.engines["small"][0]
    assert second.checksum == small.checksum != first.checksum
    before = second.load().generated_tokens
    again = await house.run(evaluation(6, index=50))
    assert {event.state for event in again.values()} == {COMPLETED}
    assert second.load().generated_tokens > before
    assert {policy for policy, _ in (await listed(house)).values()} == {"big", "small"}


async def test_turns_that_do_not_end_in_time_go_on_elsewhere_and_say_the_same(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO, agents={"solver": {"sampling": {"max_new_tokens": 60}}})
    undisturbed = await house.run(evaluation(4))
    _, second = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(4)))
    await until(lambda: second.load().running > 0)
    moved = await move(house, second, "small", drain_seconds=0)
    assert moved.handed_back > 0
    for key, event in (await running).items():
        assert event.state == COMPLETED
        assert [t.response for t in event.turns] == [t.response for t in undisturbed[key].turns]


async def test_moving_twice_is_moving_once(house: House, workshop: Made) -> None:
    await house.prepare("team", **TWO)
    _, second = workshop.engines["big"]
    second.update_delay = 0.2
    both = [asyncio.create_task(move(house, second, "small")) for _ in range(2)]
    await until(lambda: second.state == common_pb.ENGINE_STATE_STALE)
    assert (await refusal(house, second, "big")).kind == "engine_moving"
    assert [moved.source for moved in await asyncio.gather(*both)] == ["big", "big"]
    assert second.updates == [0, 0]
    assert (await move(house, second, "small")).source == "small"
    assert second.updates == [0, 0]
    # And back.
    assert (await move(house, second, "big")).source == "small"


async def test_an_impossible_move_is_refused_with_the_reason(house: House, workshop: Made) -> None:
    await house.prepare("team", **TWO)
    first, second = workshop.engines["big"]
    [small] = workshop.engines["small"]
    error = await refusal(house, small, "big")
    assert error.kind == "policy_at_minimum"
    assert "'small' has 1 serving engines and keeps 1" in error.message
    assert isinstance(await refusal(house, "nobody", "big"), NotFound)
    assert isinstance(await refusal(house, first, "huge"), InvalidArgument)
    for seconds in (-1.0, math.nan, math.inf, 1e308):
        error = await refusal(house, first, "small", drain_seconds=seconds)
        assert isinstance(error, InvalidArgument)
        assert error.field == "drain_seconds"
    second.failing_starts = 1000
    second.pull_plug()
    error = await refusal(house, second, "small")
    assert isinstance(error, FailedPrecondition)
    assert error.kind == "engine_not_serving"
    # The other one is the last that serves.
    assert (await refusal(house, first, "small")).kind == "policy_at_minimum"


async def test_an_engine_that_does_not_get_the_other_weights_goes_back(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO)
    first, second = workshop.engines["big"]
    second.failing_updates = 1
    job = house.service._jobs.get(house.job_id)
    # Not through the client, which would try again: by then it might be back.
    with pytest.raises(UpdateFailed, match="the link broke"):
        await job.moves.move(second.engine_id, job.policy("small"))
    await until(lambda: second.state == HEALTHY)
    assert second.checksum == first.checksum
    assert (await listed(house))[second.engine_id] == ("big", HEALTHY)
    # It can die and come back there, and it can be moved again.
    second.pull_plug()
    await until(lambda: second.state == HEALTHY)
    assert (await move(house, second, "small")).source == "big"


async def test_an_engine_that_dies_on_its_way_arrives_through_a_restart(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO, agents={"solver": {"sampling": {"max_new_tokens": 60}}})
    _, second = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(4)))
    await until(lambda: second.load().running > 0)
    moving = asyncio.create_task(move(house, second, "small"))
    await until(lambda: second.state == common_pb.ENGINE_STATE_DRAINING)
    assert (await listed(house))[second.engine_id] == ("big", common_pb.ENGINE_STATE_DRAINING)
    second.pull_plug()
    assert (await moving).engine.restarts == 1
    assert {event.state for event in (await running).values()} == {COMPLETED}


async def test_engines_that_policies_share_stay_with_them(house: House, workshop: Made) -> None:
    own = {**make_spec()["policies"]["big"], "engine": {"replicas": 2}}
    model = {"config": None, "path": model_path()}
    frozen = {"trainable": False, "engine": {"replicas": 2}, "model": model}
    await house.prepare(
        "team",
        policies={"big": frozen, "small": frozen, "third": own},
        agents={"third": {"policy": "third"}},
    )
    for source, target in (("big", "small"), ("big", "third"), ("third", "small")):
        error = await refusal(house, workshop.engines[source][1], target)
        assert error.kind == "engine_shared"
        assert "engine.share to `never`" in error.remedy


async def test_an_engine_of_another_make_is_refused_or_made_anew(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **UNLIKE)
    error = await refusal(house, workshop.engines["big"][1], "small")
    assert error.kind == "engine_not_movable"
    await house.prepare("team", **UNLIKE, balancing={"rebuild": True})
    _, second = workshop.engines["big"][-2:]
    running = asyncio.create_task(house.run(evaluation(8)))
    await until(lambda: second.load().generated_tokens > 0)
    moved = await move(house, second, "small")
    assert moved.rebuilt
    assert moved.engine.engine_id == second.engine_id
    assert second.state == common_pb.ENGINE_STATE_STOPPED
    assert workshop.engines["small"][-1].max_context == 320
    assert {event.state for event in (await running).values()} == {COMPLETED}
    await listed(house)


async def test_an_engine_that_cannot_be_rebuilt_is_made_as_it_was(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **UNLIKE, balancing={"rebuild": True})
    _, second = workshop.engines["big"]
    workshop.broken["small"] = 1
    assert "not today" in (await refusal(house, second, "small")).message
    third = workshop.engines["big"][-1]
    assert third is not second
    await until(lambda: third.state == HEALTHY)
    assert (await listed(house))[second.engine_id] == ("big", HEALTHY)
    assert third.max_context == 384


async def test_versions_that_come_while_an_engine_moves_reach_it(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO)
    first, second = workshop.engines["big"]
    second.update_delay = 0.2
    moving = asyncio.create_task(move(house, second, "small"))
    await until(lambda: second.state == common_pb.ENGINE_STATE_STALE)
    small, big = house.publish("small", 1), house.publish("big", 3)
    await asyncio.gather(house.update(small), house.update(big))
    assert (await moving).engine.version == 1
    assert second.checksum == small.checksum
    assert first.checksum == big.checksum


async def test_a_job_that_is_released_stops_the_engine_on_its_way(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO)
    _, second = workshop.engines["big"]
    second.update_delay = 5.0
    moving = asyncio.create_task(move(house, second, "small"))
    await until(lambda: second.state == common_pb.ENGINE_STATE_STALE)
    await house.rollout.ReleaseJob(
        rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=house.job_id),
        timeout=PATIENCE,
    )
    assert second.state == common_pb.ENGINE_STATE_STOPPED
    with pytest.raises(TroupeError):
        await moving


async def test_a_job_that_is_prepared_again_keeps_its_engines_where_they_are(
    house: House, workshop: Made
) -> None:
    await house.prepare("team", **TWO)
    _, second = workshop.engines["big"]
    await move(house, second, "small")
    await house.prepare("team", **TWO)
    assert (await listed(house))[second.engine_id] == ("small", HEALTHY)


async def test_turns_that_an_engine_does_not_give_back_cost_a_restart_and_nothing_more(
    house: House, workshop: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_ABORT_SECONDS", 0.1)
    await house.prepare("team", **TWO, agents={"solver": {"sampling": {"max_new_tokens": 200}}})
    _, second = workshop.engines["big"]

    async def deaf(request_id: str) -> None:
        pass

    running = asyncio.create_task(house.run(evaluation(4)))
    await until(lambda: second.load().running > 0)
    monkeypatch.setattr(second, "abort", deaf)
    moved = await move(house, second, "small", drain_seconds=0.0)
    assert moved.engine.restarts == 1
    assert {event.state for event in (await running).values()} == {COMPLETED}
    assert (await listed(house))[second.engine_id] == ("small", HEALTHY)


async def test_an_engine_that_can_move_neither_way_is_rebuilt_where_it_was(
    house: House, workshop: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.prepare("team", **TWO)
    _, second = workshop.engines["big"]

    def refuses(policy: str) -> None:
        raise IllegalTransition("in no state for it")

    monkeypatch.setattr(second, "assign", refuses)
    job = house.service._jobs.get(house.job_id)
    with pytest.raises(IllegalTransition):
        await job.moves.move(second.engine_id, job.policy("small"))
    third = workshop.engines["big"][-1]
    assert third is not second
    await until(lambda: third.state == HEALTHY)
    assert second.state == common_pb.ENGINE_STATE_STOPPED
    assert (await listed(house))[second.engine_id] == ("big", HEALTHY)


async def test_a_job_that_is_released_stops_the_engine_on_its_way_back(
    house: House, workshop: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.prepare("team", **UNLIKE, balancing={"rebuild": True})
    _, second = workshop.engines["big"]
    workshop.broken["small"] = 1
    stopping = asyncio.Event()
    stop = FragileEngine.stop

    async def slowly(engine: FragileEngine) -> None:
        if engine.policy == "small" and not stopping.is_set():
            stopping.set()
            await asyncio.sleep(5)
        await stop(engine)

    monkeypatch.setattr(FragileEngine, "stop", slowly)
    moving = asyncio.create_task(move(house, second, "small"))
    await stopping.wait()
    assert second.engine_id in await listed(house)
    await house.rollout.ReleaseJob(
        rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=house.job_id),
        timeout=PATIENCE,
    )
    made = [engine for engines in workshop.engines.values() for engine in engines]
    assert {engine.state for engine in made} == {common_pb.ENGINE_STATE_STOPPED}
    with pytest.raises(TroupeError):
        await moving
