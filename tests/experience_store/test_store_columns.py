"""Columns that arrive after their row: rewards, references, and missing ones."""

from __future__ import annotations

import numpy as np
import pytest

from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_sample, make_stage
from troupe import tensors
from troupe.rpc import FailedPrecondition, NotFound, new_id
from troupe.v1 import experience_store_pb2 as store_pb


def column(*values: float) -> store_pb.Column:
    return store_pb.Column(tensor=tensors.to_proto(np.array(values, np.float32)))


async def append_unrewarded(stage: Stage) -> list[str]:
    samples = []
    for query, trajectory in stage.trajectories:
        sample = make_sample(query, 0, trajectory, reward=None)
        await stage.append(query, trajectory, [sample])
        samples.append(sample.sample_id)
    return samples


async def test_a_group_waits_for_its_last_reward(stage: Stage) -> None:
    samples = await append_unrewarded(stage)
    assert await stage.counts() == {"pending": 4}
    assert (await stage.claim()).outcome == Response.OUTCOME_WAIT
    assert await stage.fill(samples[0], reward=0.5) == ("P", True)
    assert await stage.fill(samples[1], reward=-1.5) == ("R", True)
    response = await stage.claim(samples=2)
    assert ids_of(response) == samples[:2]
    assert [list(claimed.group_rewards) for claimed in response.samples] == [[0.5, -1.5]] * 2
    assert response.samples[1].sample.reward == -1.5
    # The step is sealed but not final: the other group may still arrive.
    assert (await stage.claim()).outcome == Response.OUTCOME_WAIT


async def test_a_reward_may_come_before_its_group_is_complete(stage: Stage) -> None:
    await stage.append("q0", "q0-s0-t0", [make_sample("q0", 0, "q0-s0-t0", reward=None)])
    assert await stage.fill("q0_0_q0-s0-t0", reward=1.0) == ("P", True)
    await stage.append("q0", "q0-s0-t1", [make_sample("q0", 0, "q0-s0-t1", reward=0.0)])
    assert await stage.counts() == {"ready": 2}


async def test_the_first_value_of_a_column_stays(stage: Stage) -> None:
    samples = await append_unrewarded(stage)
    assert await stage.fill(samples[0], reward=0.5) == ("P", True)
    assert await stage.fill(samples[0], reward=0.5) == ("P", False)
    assert await stage.fill(samples[0], reward=7.0) == ("P", False)
    await stage.fill(samples[1], reward=0.0)
    response = await stage.claim(samples=2)
    assert [claimed.sample.reward for claimed in response.samples] == [0.5, 0.0]
    # Also when nothing new could be written any more.
    assert await stage.fill(samples[0], reward=0.5) == ("C", False)


async def test_rewards_keep_every_bit(stage: Stage) -> None:
    samples = await append_unrewarded(stage)
    rewards = [0.1, 1 / 3, -1e-300, 1e22]
    for sample, reward in zip(samples, rewards, strict=True):
        await stage.fill(sample, reward=reward)
    response = await stage.claim()
    assert [claimed.sample.reward for claimed in response.samples] == rewards
    assert list(response.samples[0].group_rewards) == rewards[:2]


async def test_required_columns_gate_readiness_and_reach_the_claimant(store: Store) -> None:
    stage = await make_stage(
        store, new_id("job"), queries=("q",), group_size=1, required=["ref_logprobs"]
    )
    early = store_pb.Column(json='{"plan": 1}')
    await stage.append("q", "t", [make_sample("q", 0, "t", columns={"notes": early})])
    assert await stage.counts() == {"pending": 1}
    assert await stage.fill("q_0_t", columns={"notes": column(1)}) == ("P", False)
    filled = {"ref_logprobs": column(-1, -2), "mask": column(0, 1)}
    assert await stage.fill("q_0_t", columns=filled) == ("R", True)
    # An optional column may still arrive while the sample is unclaimed.
    assert await stage.fill("q_0_t", columns={"late": column(3)}) == ("R", True)
    sample = (await stage.claim()).samples[0].sample
    assert sample.columns["notes"] == early
    assert sample.columns["late"] == column(3)
    assert {name: sample.columns[name] for name in filled} == filled


async def test_a_demonstration_waits_for_no_column(store: Store) -> None:
    stage = await make_stage(
        store, new_id("job"), queries=("q",), group_size=1, required=["ref_logprobs"]
    )
    sample = make_sample("q", 0, "t")
    sample.demonstration = True
    await stage.append("q", "t", [sample])
    assert await stage.counts() == {"ready": 1}
    assert ids_of(await stage.claim()) == ["q_0_t"]


async def test_columns_of_a_claimed_sample_are_final(stage: Stage) -> None:
    await stage.append_all()
    response = await stage.claim()
    with pytest.raises(FailedPrecondition) as error:
        await stage.fill(ids_of(response)[0], columns={"late": column(1)})
    assert error.value.kind == "sample_final"


async def test_a_reward_that_cannot_be_computed_drops_its_sample(stage: Stage) -> None:
    samples = await append_unrewarded(stage)
    for sample in samples[1:3]:
        await stage.fill(sample, reward=1.0)
    await stage.fill(samples[0], columns={"notes": column(1)})
    assert await stage.fill(samples[0], drop_reason="reward_timeout: 30 s") == ("D", True)
    assert await stage.fill(samples[0], drop_reason="reward_timeout: 31 s") == ("D", False)
    assert await stage.fill(samples[0], reward=1.0) == ("D", False)
    assert await stage.counts() == {"pending": 2, "ready": 1, "dropped": 1}
    assert await stage.fill(samples[3], drop_reason="reward_raised: KeyError") == ("D", True)
    response = await stage.claim(claim="c1")
    assert ids_of(response) == samples[1:3]
    assert [list(claimed.group_rewards) for claimed in response.samples] == [[1.0], [1.0]]
    status = await stage.store.steps.status(stage.job, 0)
    solver = next(counts for counts in status.counts if counts.policy == "solver")
    assert dict(solver.drop_reasons) == {"reward_timeout": 1, "reward_raised": 1}
    commit, _ = await stage.commit(["c1"])
    assert commit.num_samples == 2
    rows = await stage.store.database.call("KEYS", f"*{stage.job}/solver*rows*")
    assert rows == []


async def test_a_final_sample_cannot_be_dropped(stage: Stage) -> None:
    await stage.append_all()
    with pytest.raises(FailedPrecondition) as error:
        await stage.fill("q0_1_q0-s0-t0", drop_reason="changed my mind")
    assert error.value.kind == "sample_final"


async def test_an_unknown_sample_is_named(stage: Stage) -> None:
    with pytest.raises(NotFound) as error:
        await stage.fill("q0_0_q0-s0-t0", reward=1.0)
    assert (error.value.kind, error.value.value) == ("sample_not_found", "q0_0_q0-s0-t0")


async def test_a_value_stored_elsewhere_passes_through_by_reference(store: Store) -> None:
    stage = await make_stage(
        store, new_id("job"), policies=("solver",), queries=("q",), group_size=1, required=["image"]
    )
    early = store_pb.Column(ref=f"{stage.job}/columns/early")
    late = store_pb.Column(ref=f"{stage.job}/columns/late")
    await stage.append("q", "q-t0", [make_sample("q", 0, "q-t0", columns={"mask": early})])
    assert await stage.counts() == {"pending": 1}, "the reference does not stand for another"
    assert await stage.fill("q_0_q-t0", columns={"image": late}) == ("R", True)
    assert await stage.fill("q_0_q-t0", columns={"image": early}) == ("R", False)
    (claimed,) = (await stage.claim(claim="c1")).samples
    assert dict(claimed.sample.columns) == {"mask": early, "image": late}
    # The store neither counts nor frees values that are stored elsewhere.
    assert (await store.high_water.of_job(stage.job))["solver"] < 1000
    await stage.commit(["c1"])
    assert (await store.high_water.of_job(stage.job))["solver"] == 0
