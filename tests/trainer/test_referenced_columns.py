"""Columns of which the store holds only a reference: loaded, deleted, or lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from services.trainer import step
from tests.support.training import score
from tests.support.waiting import PATIENCE
from tests.trainer.stage import TrainingStage
from troupe import tensors
from troupe.v1 import experience_store_pb2 as store_pb


async def test_columns_by_reference_are_loaded_and_then_deleted(stage: TrainingStage) -> None:
    spec = stage.spec(
        algorithm={"kl_coefficient": 0.1},
        pipeline={
            "steps": 10,
            "queries_per_step": 2,
            "required_columns": ["reference_logprobs"],
        },
    )
    trainer = await stage.trainer()
    await stage.open(required_columns=["reference_logprobs"])
    await trainer.bind(spec)
    assert not trainer.worker.bindings.bound[(stage.job_id, "solver")].learner.needs_reference
    model = stage.first_model(spec)
    keys, expected, tokens = [], 0.0, 0
    for index, (query, trajectory, samples) in enumerate(stage.rollouts(model)):
        sample = samples[0]
        ids = [*tensors.from_proto(sample.prompt_ids), *tensors.from_proto(sample.response_ids)]
        own = score(model, ids, len(tensors.from_proto(sample.prompt_ids)))
        reference = own + np.float32(0.1)
        column = sample.columns["reference_logprobs"]
        if index % 2:
            key = f"{stage.job_id}/columns/{sample.sample_id}"
            stage.transfer.set(key, {"value": torch.from_numpy(reference)})
            column.ref = key
            keys.append(key)
        else:
            column.tensor.CopyFrom(tensors.to_proto(reference))
        expected += float(np.sum(np.exp(reference - own) - (reference - own) - 1))
        tokens += len(own)
        await stage.append(query, trajectory, samples)
    commit = await trainer.run(0, 0)
    assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert commit.metrics["kl"] == pytest.approx(expected / tokens, rel=1e-3)
    assert keys
    assert not any(stage.transfer.exists(key) for key in keys)


async def test_owners_that_do_not_answer_do_not_delay_training(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are deleted outside of the compute thread, and the step ends without their owners."""
    monkeypatch.setattr(step, "_DROP_SECONDS", 0.05)
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    binding = trainer.worker.bindings.bound[(stage.job_id, "solver")]
    away, asked = threading.Event(), list[str]()

    def drop(keys: Iterable[str]) -> None:
        asked.extend([threading.current_thread().name, *keys])
        assert away.wait(PATIENCE)

    monkeypatch.setattr(binding, "drop_columns", drop)
    ref = f"{stage.job_id}/columns/picture"
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec)):
        samples[0].columns["picture"].ref = ref
        await stage.append(query, trajectory, samples)
    try:
        commit = await trainer.run(0, 0)
    finally:
        away.set()
    assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert asked[1:] == [ref]
    assert not asked[0].startswith("compute")


async def test_samples_whose_values_are_gone_are_dropped(stage: TrainingStage) -> None:
    """The step continues with the others; values that training does not read may be missing."""
    commits = []
    for gone in (frozenset({"q0-s0-t1", "q1-s0-t2"}), frozenset[str]()):
        run, trainer = await stage.sibling()
        spec = run.spec(
            algorithm={"kl_coefficient": 0.1},
            pipeline={"steps": 10, "queries_per_step": 2, "micro_batch_samples": 3},
        )
        await run.open()
        await trainer.bind(spec)
        for query, trajectory, samples in run.rollouts(run.first_model(spec)):
            key = f"{run.job_id}/columns/{trajectory}"
            if trajectory not in gone:
                length = samples[0].response_ids.shape[0]
                run.transfer.set(key, {"value": torch.zeros(length)})
            samples[0].columns["reference_logprobs"].ref = key
            # Training does not read this one, so it may be missing.
            samples[0].columns["picture"].ref = f"{run.job_id}/columns/{trajectory}/picture"
            await run.append(query, trajectory, samples)
        commits.append(await trainer.run(0, 0))
        audit = await run.store.AuditTables(store_pb.AuditTablesRequest(job_id=run.job_id))
        assert not audit.violations
        [policy] = audit.policies
        assert (policy.trained, policy.dropped) == (8 - len(gone), len(gone))
        assert dict(policy.drop_reasons) == ({"value_gone": len(gone)} if gone else {})
        assert not run.transfer.keys(f"{run.job_id}/columns/")
    less, whole = commits
    assert less.outcome == whole.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert (less.num_samples, whole.num_samples) == (6, 8)
    assert less.metrics["train/values_gone"] == 2
    assert "train/values_gone" not in whole.metrics


async def test_columns_of_dropped_samples_are_deleted_before_the_step_ends(
    stage: TrainingStage,
) -> None:
    """If the leases are lost, the next trainer never sees the dropped samples."""
    spec = stage.spec(algorithm={"kl_coefficient": 0.1})
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    keys = []
    for index, (query, trajectory, samples) in enumerate(rollouts[:4]):
        if index < 2:
            samples[0].columns["reference_logprobs"].ref = f"{stage.job_id}/columns/{index}/gone"
            keys.append(f"{stage.job_id}/columns/{index}/picture")
            stage.transfer.set(keys[-1], {"value": torch.ones(1)})
            samples[0].columns["picture"].ref = keys[-1]
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.run(0, 0))
    await trainer.trained(2)
    assert not any(stage.transfer.exists(key) for key in keys)
    assert not running.done()
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    commit = await running
    assert (commit.num_samples, commit.metrics["train/values_gone"]) == (6, 2)


async def test_a_step_whose_values_are_all_gone_has_no_samples(stage: TrainingStage) -> None:
    spec = stage.spec(algorithm={"kl_coefficient": 0.1})
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec)):
        samples[0].columns["reference_logprobs"].ref = "nowhere/columns/x"
        await stage.append(query, trajectory, samples)
    commit = await trainer.run(0, 0)
    assert commit.outcome == store_pb.STEP_OUTCOME_EMPTY
    assert commit.metrics["train/values_gone"] == 8
    assert commit.weights.version == first.version
    audit = await stage.store.AuditTables(store_pb.AuditTablesRequest(job_id=stage.job_id))
    assert not audit.violations
    assert dict(audit.policies[0].drop_reasons) == {"value_gone": 8}


async def test_only_columns_of_the_job_are_deleted(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    stage.transfer.set("other/columns/x", {"value": torch.ones(1)})
    rollouts = stage.rollouts(stage.first_model(spec))
    for (query, trajectory, samples), ref in zip(
        rollouts, [first.key, "other/columns/x"] * 4, strict=True
    ):
        samples[0].columns["picture"].ref = ref
        await stage.append(query, trajectory, samples)
    await trainer.run(0, 0)
    assert stage.transfer.exists(first.key)
    assert stage.transfer.exists("other/columns/x")
