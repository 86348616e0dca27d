"""The simulated learner: its time, which policies of a worker share, and its real surroundings."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from testbed.simulated_learner import SimulatedLearner, stand_in
from testbed.timeline import busy_within, read_spans
from tests.support.waiting import PATIENCE, until
from tests.trainer.stage import TrainingStage
from troupe.job import JobSpec
from troupe.rpc import ResourceExhausted
from troupe.v1 import experience_store_pb2 as store_pb

# A step of 8 samples with 4 prompt and 2 response tokens: 48 tokens.
PACE = {"backward_tokens_per_second": 120, "step_seconds": 0.1}
SECONDS = 48 / 120 + 0.1
# The additional time of a busy machine.
LATE = 1.5


def simulated(stage: TrainingStage, *policies: str, **pace: Any) -> JobSpec:
    spec = stage.spec(policies=policies)
    values = spec.model_dump()
    for name in policies:
        values["policies"][name]["simulated"] = PACE | pace
    return JobSpec.model_validate(values)


async def fill(stage: TrainingStage, policies: tuple[str, ...], step: int = 0) -> None:
    await stage.open(step, policies=policies, version=step)
    for query in ("q0", "q1"):
        for number in range(4):
            trajectory = f"{query}-s{step}-t{number}"
            samples = [
                stage_sample(query, trajectory, policy, turn, float(number % 2), step)
                for turn, policy in enumerate(policies)
            ]
            await stage.append(query, trajectory, samples, step)


def stage_sample(
    query: str, trajectory: str, policy: str, turn: int, reward: float, version: int
) -> store_pb.Sample:
    from tests.support.training import make_rollout

    return make_rollout(
        query,
        trajectory,
        policy=policy,
        turn=turn,
        prompt=(5, 6, 7, 8),
        response=(9, 10),
        reward=reward,
        version=version,
    )


@pytest.mark.slow
async def test_a_step_takes_its_modelled_time_and_makes_a_version(
    stage: TrainingStage, tmp_path: Path
) -> None:
    trainer = await stage.trainer(simulated_trace_dir=tmp_path / "trace", worker_id="w0")
    spec = simulated(stage, "solver")
    first = await trainer.bind(spec)
    await fill(stage, ("solver",))
    began, wall = time.monotonic(), time.time()
    commit = await trainer.run(0, 0)
    took = time.monotonic() - began
    assert SECONDS <= took < SECONDS + LATE
    assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert commit.weights.version == 1
    assert commit.weights.checksum != first.checksum
    assert commit.num_samples == 8
    assert commit.samples_digest
    assert commit.metrics["tokens"] == 48
    assert commit.metrics["train/seconds"] == pytest.approx(SECONDS)
    weights = stage.weights(commit.weights)
    assert int(weights["version"]) == 1
    assert weights["embedding.weight"].equal(stage.weights(first)["embedding.weight"])
    spans = read_spans(tmp_path / "trace")
    assert {(span.lane, span.policy) for span in spans} == {("w0", "solver")}
    busy = busy_within(spans, wall, wall + took)
    assert SECONDS - 0.01 <= busy < SECONDS + LATE

    path = await trainer.checkpoint(1)
    assert json.loads((path / "config.json").read_text())["model_type"] == "simulated"

    # A new worker continues from the state on disk.
    other = await stage.trainer()
    again = await other.bind(spec, version=1, checksum=commit.weights.checksum)
    assert again.checksum == commit.weights.checksum
    await fill(stage, ("solver",), step=1)
    assert (await other.run(1, 1)).weights.version == 2


@pytest.mark.slow
async def test_policies_of_one_worker_share_its_time(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    policies = ("solver", "checker")
    spec = simulated(stage, *policies)
    for policy in policies:
        await trainer.bind(spec, policy)
    await fill(stage, policies)
    began = time.monotonic()
    commits = await asyncio.gather(*(trainer.run(0, 0, policy) for policy in policies))
    took = time.monotonic() - began
    assert [commit.weights.version for commit in commits] == [1, 1]
    assert 2 * SECONDS <= took < 2 * SECONDS + LATE


async def test_the_simulated_state_has_the_given_size(stage: TrainingStage) -> None:
    spec = simulated(stage, "solver", state_bytes=1000)
    learner = SimulatedLearner(stand_in("solver", spec), spec, "solver", "w0", None)

    def size() -> int:
        return sum(tensor.nbytes for tensor in learner.suspended()[0].values())

    whole = size()
    tensors, values = learner.suspended()
    assert sum(tensor.nbytes for tensor in learner.release()) >= 1000
    assert size() <= whole - 1000
    learner.adopt(tensors, values)
    assert size() == whole


async def test_a_step_that_is_given_up_stops_waiting(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    await trainer.bind(simulated(stage, "solver", backward_tokens_per_second=1))
    await fill(stage, ("solver",))
    step = asyncio.create_task(trainer.run(0, 0))
    async with asyncio.timeout(PATIENCE):
        await until(trainer.accumulates)
        await asyncio.sleep(0.2)  # some moment of the step, which takes far longer
        await trainer.release()
        with pytest.raises(Exception, match="given up"):
            await step


async def test_states_go_to_files_while_shared_memory_has_no_room(
    stage: TrainingStage, small_disk: Path
) -> None:
    spec = simulated(stage, "solver", state_bytes=8 << 20)
    alone = await stage.trainer(transfer_dir=small_disk)
    await alone.bind(spec)
    with pytest.raises(ResourceExhausted):
        await alone.suspend()
    files = stage.root / "files"
    trainer = await stage.trainer(transfer_dir=small_disk, transfer_fallback_dir=files)
    await trainer.bind(spec)
    state = await trainer.suspend()
    assert (files / state.key).stat().st_size > 8 << 20
    await trainer.resume(spec, state)
    assert not (files / state.key).exists()


@pytest.mark.slow
async def test_while_another_computes_a_policy_comes_and_goes_at_no_cost(
    stage: TrainingStage,
) -> None:
    spec = simulated(stage, "leaves", "stays", backward_tokens_per_second=12, state_bytes=64 << 20)
    trainer = await stage.trainer()
    for policy in spec.policies:
        await trainer.bind(spec, policy)
    await fill(stage, ("leaves", "stays"))
    quiet = await trainer.suspend("leaves")
    await trainer.resume(spec, quiet, policy="leaves")
    running = asyncio.create_task(trainer.events(0, 0, "stays"))
    await until(trainer.accumulates)
    await asyncio.sleep(0.2)  # some moment of the step, which takes far longer
    began = time.monotonic()
    state = await trainer.suspend("leaves")
    assert state.seconds < quiet.seconds / 5, "nobody computed then"
    # It arrives when the micro-batch is over; its wait until then delays nothing.
    await trainer.resume(spec, state, policy="leaves")
    waited = time.monotonic() - began
    (status,) = [one for one in await trainer.statuses() if one.policy == "leaves"]
    assert status.swaps == 4
    assert waited > 1
    assert status.swap_seconds < waited / 2
    await running
