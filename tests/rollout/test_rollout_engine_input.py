"""Bad input to engines, as it looks through the rollout service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.fragile import Workshop
from tests.rollout.house import CONFIG, House, evaluation, make_spec, open_house, weights
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE, until
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
HEALTHY = common_pb.ENGINE_STATE_HEALTHY


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


async def generate(house: House, ids: list[int], **sampling: int) -> rollout_pb.GenerateResponse:
    request = rollout_pb.GenerateRequest(
        job_id=house.job_id,
        policy="big",
        input_ids=ids,
        sampling=common_pb.SamplingParams(**sampling),
    )
    answer: rollout_pb.GenerateResponse = await house.rollout.Generate(request, timeout=PATIENCE)
    return answer


async def test_weights_that_do_not_fit_touch_no_engine_of_the_policy(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded", policies={"big": {"engine": {"replicas": 2}}})
    engines = workshop.engines["big"]
    # Even if an engine would have taken them: the other one would not.
    narrow = {name: tensor.clone() for name, tensor in weights(1).items()}
    narrow["model.norm.weight"] = narrow["model.norm.weight"].bfloat16()
    key = f"{house.job_id}/big/weights@1"
    checksum = house.transfer.set(key, narrow).checksum
    ref = common_pb.WeightsRef(
        job_id=house.job_id, policy="big", version=1, key=key, checksum=checksum
    )
    running = asyncio.create_task(house.run(evaluation(2)))
    with pytest.raises(FailedPrecondition, match=r"the model wants torch\.float32") as info:
        await house.update(ref)
    assert info.value.kind == "weights_refused"
    assert [engine.updates for engine in engines] == [[0], [0]]
    assert {(e.state, e.version) for e in engines} == {(HEALTHY, 0)}
    assert {event.state for event in (await running).values()} == {COMPLETED}
    # The version number is still free.
    await house.update(house.publish("big", 2, seed=1))
    assert {(e.state, e.version) for e in engines} == {(HEALTHY, 2)}


async def test_a_sleeping_engine_misses_an_update_and_catches_up(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded", policies={"big": {"engine": {"replicas": 2}}})
    first, second = workshop.engines["big"]
    await first.sleep()
    await house.update(house.publish("big", 1))
    assert (first.asleep, second.version) == ({"weights", "kv_cache"}, 1)
    ended = await house.run(evaluation(3))
    assert {event.state for event in ended.values()} == {COMPLETED}
    await asyncio.sleep(1.2)  # its keeper looks every second, and leaves it alone
    assert first.asleep
    await first.wake()
    await until(lambda: first.state == HEALTHY)
    assert first.version == 1


async def test_restarted_turns_complete_their_trajectories_in_one_version(
    house: House, workshop: Workshop
) -> None:
    engine_spec = {"in_flight": "restart"}
    await house.prepare("long_winded", policies={"big": {"engine": engine_spec}})
    [engine] = workshop.engines["big"]
    running = asyncio.create_task(house.run(evaluation(4)))
    await until(lambda: engine.load().generated_tokens >= 10)
    await house.update(house.publish("big", 1))
    for event in (await running).values():
        assert event.state == COMPLETED
        for turn in event.turns:
            assert len(turn.versions) == 1


async def test_requests_that_no_engine_can_serve(house: House) -> None:
    await house.prepare("long_winded")
    with pytest.raises(InvalidArgument, match="leaves no room for a response") as info:
        await generate(house, [5] * 384)
    assert info.value.field == "policies.big.engine.max_context"
    with pytest.raises(InvalidArgument, match="vocabulary"):
        await generate(house, [CONFIG["vocab_size"]])
    with pytest.raises(InvalidArgument, match="max_new_tokens = 0"):
        await generate(house, [5], max_new_tokens=0)
    answer = await generate(house, [5], max_new_tokens=7, seed=3)
    assert answer.finish_reason in ("length", "stop")
    assert len(answer.output_ids) <= 7


async def test_a_job_on_a_server_with_another_vocabulary_is_not_prepared(tmp_path: Path) -> None:
    fake = FakeSglang(CONFIG)
    fake.vocabulary = 151_936
    async with serve(fake) as url, open_house(tmp_path) as house:
        spec = make_spec("long_winded")
        engine = {"kind": "sglang", "urls": [url], "start_timeout_seconds": PATIENCE}
        spec["policies"]["big"]["engine"] |= engine
        with pytest.raises(FailedPrecondition, match="vocabulary of 151936 tokens") as info:
            await house.prepare_raw(spec)
        assert info.value.field == "policies.big.engine.urls"
        fake.vocabulary = CONFIG["vocab_size"]
        await house.prepare_raw(spec)
        ended = await house.run(evaluation(2))
        assert {event.state for event in ended.values()} == {COMPLETED}


async def test_engines_leave_their_devices_and_come_back_with_the_newest_version(
    house: House, workshop: Workshop
) -> None:
    await house.prepare("long_winded", policies={"big": {"engine": {"replicas": 2}}})
    first, second = workshop.engines["big"]
    who: dict[str, Any] = {"job_id": house.job_id, "policies": ["big"]}
    await house.rollout.SleepEngines(rollout_pb.SleepEnginesRequest(**who), timeout=PATIENCE)
    await house.rollout.SleepEngines(rollout_pb.SleepEnginesRequest(**who), timeout=PATIENCE)
    assert first.asleep == second.asleep == {"weights", "kv_cache"}
    # An update waits for them, and one that dies is not brought back onto the device.
    await house.update(house.publish("big", 1))
    second.pull_plug()
    await asyncio.sleep(1.2)  # its keeper looks every second
    assert (first.asleep, second.state) == ({"weights", "kv_cache"}, common_pb.ENGINE_STATE_DEAD)
    # Turns wait.
    running = asyncio.create_task(house.run(evaluation(2)))
    await house.rollout.WakeEngines(rollout_pb.WakeEnginesRequest(**who), timeout=PATIENCE)
    await house.rollout.WakeEngines(rollout_pb.WakeEnginesRequest(**who), timeout=PATIENCE)
    assert {(e.state, e.version) for e in (first, second)} == {(HEALTHY, 1)}
    assert {event.state for event in (await running).values()} == {COMPLETED}
    request = rollout_pb.SleepEnginesRequest(job_id=house.job_id, policies=["none"])
    with pytest.raises(InvalidArgument, match="has no policy 'none'"):
        await house.rollout.SleepEngines(request, timeout=PATIENCE)
