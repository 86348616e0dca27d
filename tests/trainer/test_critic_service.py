"""Critics and steps of several updates through a real store and trainer workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learning.learner import Learner
from tests.trainer.stage import TrainingStage
from troupe import tensors
from troupe.v1 import experience_store_pb2 as store_pb

SYNC = {"mode": "sync", "steps": 10, "queries_per_step": 2, "micro_batch_samples": 3}
TEAM = {"advantage": "gae", "critic": {"observes": "team", "optimizer": {"lr": 1e-2}}}


async def _play(stage: TrainingStage, model: Any, step: int, *, context: bool = True) -> None:
    """One policy's samples; the context of some is kept by reference."""
    for query, trajectory, samples in stage.rollouts(model, step=step, version=step):
        for sample in samples:
            told = np.array([7, 20 + int(sample.reward)], np.int32)
            if context and trajectory.endswith("0"):
                key = f"{stage.job_id}/columns/{sample.sample_id}/critic_context"
                stage.transfer.set(key, {"value": torch.from_numpy(told)})
                sample.columns["critic_context"].ref = key
            elif context:
                sample.columns["critic_context"].tensor.CopyFrom(tensors.to_proto(told))
        await stage.append(query, trajectory, samples, step)


async def test_a_critic_moves_with_its_policy_and_engines_never_see_it(
    stage: TrainingStage,
) -> None:
    stage.first_model(stage.spec()).save_pretrained(stage.root / "model")
    source = {"path": str(stage.root / "model"), "tokenizer": str(stage.tokenizer)}
    how: dict[str, Any] = {"model": source, "algorithm": TEAM, "pipeline": SYNC}
    spec = stage.spec(policies=("solver", "checker"), **how)
    model, trainer = stage.first_model(spec), await stage.trainer()
    first = stage.weights(await trainer.bind(spec)).keys()
    for step in range(2):
        await stage.open(step, version=step)
        await _play(stage, model, step)
        commit = await trainer.run(step, step)
        assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED, commit.reason
        ref = commit.weights
        await trainer.release()
        trainer = await stage.trainer()  # continues from the other worker's state
        await trainer.bind(spec, version=step + 1, checksum=ref.checksum)
    # The other agents' prompts determine the reward, which the second step's critic knows.
    assert commit.metrics["critic/value_mean"] != 0.0
    assert commit.metrics["loss/value"] > 0
    assert not [key for key in stage.transfer.keys(stage.job_id) if "critic" in key]
    assert stage.weights(ref).keys() == first
    (path,) = (stage.root / "runs" / stage.job_id / "state" / "solver").glob("v2-*")
    state = load_file(path / "optimizer.safetensors")
    assert int(state["critic/step/lm_head.weight"]) == 2
    critic = trainer.worker.bindings.bound[stage.job_id, "solver"].learner.moments()
    mine = {name: tensor.cpu() for name, tensor in state.items() if name.startswith("critic/")}
    assert all(torch.equal(tensor, critic[name].cpu()) for name, tensor in mine.items())


async def test_a_step_whose_second_update_fails_is_skipped_whole(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stage.spec(algorithm={"epochs": 2}, pipeline=SYNC)
    trainer = await stage.trainer()
    first = await trainer.bind(spec)
    expected = stage.weights(first)
    update, made = Learner._update, []

    def fails(self: Learner, version: int) -> str:
        made.append(update(self, version))
        return "for the test" if len(made) == 2 else made[-1]

    monkeypatch.setattr(Learner, "_update", fails)
    await stage.open()
    await stage.play(stage.first_model(spec))
    commit = await trainer.run(0, 0)
    assert (commit.outcome, commit.reason) == (store_pb.STEP_OUTCOME_SKIPPED, "for the test")
    assert made == ["", ""]
    assert commit.weights.checksum == first.checksum
    found = trainer.worker.bindings.bound[stage.job_id, "solver"].learner.published()
    assert all(torch.equal(t.cpu(), expected[n]) for n, t in found.items())
    # The next step starts from there.
    await stage.open(1)
    await stage.play(stage.first_model(spec), step=1)
    assert (await trainer.run(1, 0)).weights.version == 1
