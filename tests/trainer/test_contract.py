"""A step's calls to the store: staleness, whole groups, witnesses."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from services.trainer.learning.samples import parse_rows
from tests.support.training import VOCABULARY
from tests.trainer.batches import full_batch_gradient, relative_error
from tests.trainer.stage import TrainingStage
from troupe import tensors
from troupe.rpc import DataLoss, FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def test_a_commit_names_its_samples(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for index, (query, trajectory, samples) in enumerate(rollouts):
        if index >= 4:  # a group without signal: its gradient is zero, its samples count
            samples[0].reward = 1.0
        await stage.append(query, trajectory, samples)
    commit = await trainer.run(0, 0)
    ids = [samples[0].sample_id for _, _, samples in rollouts]
    assert commit.samples_digest == sum(xxh3_64_intdigest(i.encode()) for i in ids) % 2**64
    await trainer.checkpoint(1)  # the state is written behind the step
    (state,) = (stage.root / "runs" / stage.job_id / "state/solver").glob("v1-*")
    kept = json.loads((state / "state.json").read_text())
    assert (kept["step"], int(kept["samples_digest"], 16)) == (0, commit.samples_digest)


async def test_a_worker_adopts_a_skipped_step_with_earlier_weights(
    stage: TrainingStage,
) -> None:
    """A worker without the step adopts it as skipped: the weights come from an earlier step."""
    spec = stage.spec()
    one, two = await stage.trainer(), await stage.trainer()
    model = stage.first_model(spec)
    await stage.open()
    await one.bind(spec)
    await stage.play(model)
    first = await one.run(0, 0)
    await stage.open(1, version=1)
    for query, trajectory, samples in stage.rollouts(model, step=1, version=1):
        scores = tensors.from_proto(samples[0].logprobs)
        samples[0].logprobs.CopyFrom(tensors.to_proto(np.full_like(scores, np.nan)))
        await stage.append(query, trajectory, samples, 1)
    skipped = await one.run(1, 1)
    assert (skipped.outcome, skipped.weights) == (store_pb.STEP_OUTCOME_SKIPPED, first.weights)
    await two.bind(spec)
    assert await two.run(1, 1) == skipped
    await stage.open(2, version=1)
    await stage.play(model, step=2, version=1)
    assert (await two.run(2, 1)).weights.version == 2


async def test_samples_that_are_too_old_are_not_trained(stage: TrainingStage) -> None:
    pipeline = {"mode": "async", "steps": 10, "queries_per_step": 2, "micro_batch_samples": 4}
    spec = stage.spec(pipeline=pipeline)
    trainer = await stage.trainer()
    model = stage.first_model(spec)
    await stage.open()
    await trainer.bind(spec)
    await stage.play(model)
    await trainer.run(0, 0, oldest_version=-1)
    await stage.open(1, version=1)
    # Samples of the version before the last, which is allowed, and of an older one.
    await stage.play(model, step=1, queries=["q0"], version=1)
    await stage.play(model, step=1, queries=["q1"], version=0)
    commit = await trainer.run(1, 1, oldest_version=1)
    assert commit.num_samples == 4
    assert commit.metrics["staleness/max"] == commit.metrics["staleness/mean"] == 0.0
    assert commit.metrics["correction/weight_mean"] > 0
    await stage.open(2, version=2)
    await stage.play(model, step=2, queries=["q0"], version=2)
    await stage.play(model, step=2, queries=["q1"], version=1)
    commit = await trainer.run(2, 2, oldest_version=1)
    assert commit.num_samples == 8
    assert (commit.metrics["staleness/max"], commit.metrics["staleness/mean"]) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("mode", "algorithm"),
    [
        ("sync", {}),
        ("micro_batch", {}),
        ("sync", {"advantage": "reinforce_plus_plus", "loss": "gspo"}),
        ("micro_batch", {"advantage": "rae", "loss": "cispo", "correction": "sequence_masked"}),
    ],
)
async def test_deterministic_steps_end_with_the_same_bits(
    stage: TrainingStage, mode: str, algorithm: dict[str, Any]
) -> None:
    """Two jobs with the same samples: other arrival orders, micro-batches, workers."""
    checksums = []
    for number, size in enumerate((3, 8)):
        job, trainer = await stage.sibling()
        pipeline = {
            "mode": mode,
            "steps": 10,
            "queries_per_step": 2,
            "micro_batch_samples": size,
            "deterministic": True,
        }
        spec = stage.spec(pipeline=pipeline, algorithm=algorithm)
        await trainer.bind(spec)
        model = job.first_model(spec)
        for step in range(3):
            await job.open(step, version=step)
            rollouts = job.rollouts(model, step=step, version=step)
            for query, trajectory, samples in rollouts[:: -1 if number else 1]:
                await job.append(query, trajectory, samples, step)
            commit = await trainer.run(step, step)
        checksums.append(commit.weights.checksum)
        await trainer.checkpoint(3)  # the state is written behind the step
        states = job.root / "runs" / job.job_id / "state/solver"
        (state,) = states.glob("v3-*")
        checksums.append(json.loads((state / "state.json").read_text())["optimizer"])
    assert checksums[:2] == checksums[2:]


async def test_a_roles_baseline_goes_with_the_policy_to_another_worker(
    stage: TrainingStage,
) -> None:
    spec = stage.spec(algorithm={"advantage": "rae", "rae_decay": 0.5})
    one, two = await stage.trainer(), await stage.trainer()
    model = stage.first_model(spec)
    agent = stage.rollouts(model)[0][2][0].agent
    await stage.open()
    await one.bind(spec)
    await stage.play(model)
    first = await one.run(0, 0)
    assert first.metrics[f"baseline/{agent}"] == 0.0
    await stage.open(1, version=1)
    await stage.play(model, step=1, version=1)
    await two.bind(spec, version=1)
    second = await two.run(1, 1)
    expected = (1 - 0.5 ** first.metrics["samples"]) * first.metrics["reward/mean"]
    assert second.metrics[f"baseline/{agent}"] == pytest.approx(expected)


def _tamper(stage: TrainingStage, version: int, **values: object) -> Path:
    states = stage.root / "runs" / stage.job_id / "state/solver"
    (path,) = states.glob(f"v{version}-*/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


async def test_state_made_of_other_samples_than_the_commits_is_refused(
    stage: TrainingStage,
) -> None:
    spec = stage.spec()
    one, two = await stage.trainer(), await stage.trainer()
    await stage.open()
    await one.bind(spec)
    await stage.play(stage.first_model(spec))
    weights = (await one.run(0, 0)).weights
    await one.release()
    path = _tamper(stage, 1, samples_digest="00" * 8)
    good = path.read_text()
    await two.bind(spec, version=1, checksum=weights.checksum)
    await stage.open(1, version=1)
    await stage.play(stage.first_model(spec), step=1, version=1)
    with pytest.raises(DataLoss) as caught:
        await two.run(1, 1)
    assert caught.value.kind == "state_mismatch"
    assert (await two.statuses())[0].state == common_pb.BINDING_STATE_IDLE
    # Repaired, it continues.
    commit = (
        await stage.store.GetStep(store_pb.GetStepRequest(job_id=stage.job_id, step=0))
    ).commits[0]
    path.write_text(good.replace("00" * 8, f"{commit.samples_digest:016x}"))
    await two.release()
    await two.bind(spec, version=1, checksum=weights.checksum)
    assert (await two.run(1, 1)).weights.version == 2


async def test_state_that_is_ahead_of_the_store_is_refused(stage: TrainingStage) -> None:
    """An operator restored the state directory but not the store, or the reverse."""
    spec = stage.spec()
    one, two = await stage.trainer(), await stage.trainer()
    await stage.open()
    await one.bind(spec)
    await stage.play(stage.first_model(spec))
    weights = (await one.run(0, 0)).weights
    await one.checkpoint(1)  # the state is written behind the step
    _tamper(stage, 1, step=4)
    await two.bind(spec, version=1, checksum=weights.checksum)
    await stage.open(1, version=1)
    with pytest.raises(FailedPrecondition) as caught:
        await two.run(1, 1)
    assert caught.value.kind == "frontier_mismatch"


async def test_a_step_after_demonstrations_of_others_has_its_own_learning_rate(
    stage: TrainingStage,
) -> None:
    shown = {"tasks": {"source": "nowhere:rows"}, "steps": 1, "lr": 0.5}
    spec = stage.spec(supervised=shown, optimizer={"lr": 1e-3})
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    model = stage.first_model(spec)
    for query, trajectory, _ in stage.rollouts(model):
        await stage.append(query, trajectory, [])
    assert (await trainer.run(0, 0)).outcome == store_pb.STEP_OUTCOME_EMPTY
    await stage.open(1)
    await stage.play(model, step=1)
    assert (await trainer.run(1, 0)).metrics["lr"] == 1e-3


async def test_reused_samples_are_counted(stage: TrainingStage) -> None:
    """Replay: what step 0 trained is trained once more in step 1."""
    pipeline = {"mode": "async", "steps": 10, "queries_per_step": 2, "max_uses": 2}
    spec = stage.spec(pipeline=pipeline)
    trainer = await stage.trainer()
    model = stage.first_model(spec)
    await stage.open(max_uses=2)
    await trainer.bind(spec)
    await stage.open(1, max_uses=2)
    await stage.play(model)
    first = await trainer.run(0, 0, oldest_version=-1)
    assert first.metrics["reused_fraction"] == 0.0
    await stage.play(model, step=1)
    commit = await trainer.run(1, 1, oldest_version=0)
    assert commit.metrics["reused_fraction"] == 0.5
    assert commit.num_samples == 16


@pytest.mark.slow
async def test_a_disturbed_step_has_the_gradient_of_the_full_batch(stage: TrainingStage) -> None:
    """Two policies on one worker through the real store, samples in bits and pieces, leases that
    run out on the way: what AdamW was given is the mean gradient over all samples."""
    both = ("solver", "checker")
    optimizer = {"max_grad_norm": 1e9, "betas": [0.5, 0.95]}
    spec = stage.spec(policies=both, optimizer=optimizer)
    trainer = await stage.trainer(trainer_lease_seconds=0.8)
    await stage.open(policies=both)
    for policy in both:
        await trainer.bind(spec, policy)
    rollouts = stage.rollouts(stage.first_model(spec), policies=both)
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.gather(*(trainer.run(0, 0, policy) for policy in both))
    await trainer.trained(4)
    time.sleep(2.0)  # noqa: ASYNC251 - the worker's event loop is held up, leases run out
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    commits = await running
    assert [commit.metrics["samples"] for commit in commits] == [8, 8]
    for index, policy in enumerate(both):
        claimed = []
        for query in ("q0", "q1"):
            members = [samples[index] for q, _, samples in rollouts if q == query]
            rewards = [sample.reward for sample in members]
            claimed += [
                store_pb.ClaimedSample(sample=sample, group_rewards=rewards) for sample in members
            ]
        model = stage.first_model(spec, policy).double()
        exact = full_batch_gradient(model, parse_rows(claimed, VOCABULARY), spec)
        learner = trainer.worker.bindings.bound[(stage.job_id, policy)].learner
        # After one step AdamW's first moment is (1 - beta1) g.
        first = learner.moments()
        found = {name: first[f"exp_avg/{name}"] / (1 - 0.5) for name in exact}
        assert relative_error(found, exact) <= 1e-5
