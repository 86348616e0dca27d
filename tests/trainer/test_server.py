"""Steps through the real services: bind, train, commit, replay, attach, supersede."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.waiting import PATIENCE, until
from tests.trainer.stage import PROMPTS, TrainingStage
from troupe import tensors
from troupe.rpc import Aborted, FailedPrecondition, InvalidArgument, NotFound
from troupe.transfer import checksum_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def test_a_step_from_rollout_to_commit(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    before = stage.weights(first)
    assert (first.version, first.num_bytes) == (0, sum(t.nbytes for t in before.values()))
    model = stage.first_model(spec)
    assert checksum_of(dict(model.named_parameters())) == first.checksum

    await stage.play(model)
    events = await trainer.events(0, 0)
    commit = events[-1].commit
    assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert (commit.weights.version, commit.num_samples) == (1, 8)
    after = stage.weights(commit.weights)
    assert checksum_of(after) == commit.weights.checksum != first.checksum
    assert (events[-1].samples, events[-1].state) == (8, common_pb.BINDING_STATE_IDLE)

    metrics = commit.metrics
    assert metrics["importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["k3_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["reward/mean"] == 0.5
    assert metrics["samples"] == 8
    assert metrics["lr"] == 1e-2
    for name in ("loss/policy", "entropy", "grad_norm", "train/seconds", "train/wait_seconds"):
        assert name in metrics
    assert metrics["staleness/mean"] == metrics["clip_fraction"] == 0.0

    (status,) = await trainer.statuses()
    assert (status.version, status.state) == (1, common_pb.BINDING_STATE_IDLE)


async def test_a_repeated_step_returns_its_commit(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    await stage.play(stage.first_model(spec))
    commit = await trainer.run(0, 0)
    assert await trainer.run(0, 0) == commit
    # Also from a worker that has never seen the step.
    other = await stage.trainer()
    await other.bind(spec, version=1, checksum=commit.weights.checksum)
    assert await other.run(0, 0) == commit


async def test_resume_elsewhere_is_bitwise_the_same(stage: TrainingStage) -> None:
    """Two policies with equal weights and samples; one of them moves to another worker."""
    stage.first_model(stage.spec()).save_pretrained(stage.root / "model")
    both = ("solver", "twin")
    source = {"path": str(stage.root / "model"), "tokenizer": str(stage.tokenizer)}
    # On a GPU the fastest kernels add in varying orders.
    pipeline = {"steps": 10, "queries_per_step": 2, "deterministic": torch.cuda.is_available()}
    spec = stage.spec(policies=both, model=source, pipeline=pipeline)
    stay, leave, take = await stage.trainer(), await stage.trainer(), await stage.trainer()
    await stay.bind(spec, "solver")
    await leave.bind(spec, "twin")
    trainers = {"solver": stay, "twin": leave}
    last: dict[str, store_pb.StepCommit] = {}
    for step in range(4):
        if step == 2:
            await leave.release("twin")
            ref = last["twin"].weights
            await take.bind(spec, "twin", ref.version, ref.checksum)
            trainers["twin"] = take
        await stage.open(step, policies=both, version=step)
        await stage.play(stage.first_model(spec), policies=both, step=step)
        for policy in both:
            last[policy] = await trainers[policy].run(step, step, policy)
    assert last["solver"].weights.version == last["twin"].weights.version == 4
    assert last["solver"].weights.checksum == last["twin"].weights.checksum


async def test_a_policy_learns_to_prefer_a_rewarded_token(stage: TrainingStage) -> None:
    """One token is rewarded; the policy learns to prefer it."""
    spec = stage.spec(optimizer={"lr": 3e-2})
    trainer = await stage.trainer()
    weights = await trainer.bind(spec)
    model = stage.first_model(spec)
    shape: dict[str, Any] = {"queries": ["q0"], "group_size": 16}
    for step in range(8):
        await stage.open(step, version=step, **shape)
        for query, trajectory, samples in stage.rollouts(model, step=step, version=step, **shape):
            for sample in samples:
                sample.reward = float(tensors.from_proto(sample.response_ids)[0] < 32)
            await stage.append(query, trajectory, samples, step)
        weights = (await trainer.run(step, step)).weights
        model.load_state_dict(stage.weights(weights), strict=False)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS["q0"]])).logits[0, -1].softmax(-1)
    assert probabilities[:32].sum() > 0.75
    # Only the last versions are kept.
    keys = stage.transfer.keys(f"{stage.job_id}/solver/")
    assert [key.partition("@")[2] for key in keys] == ["7", "8"]
    assert len(list((stage.root / "runs" / stage.job_id / "state" / "solver").iterdir())) == 2


async def test_samples_that_come_late_are_waited_for(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    running = asyncio.create_task(trainer.events(0, 0))
    rollouts = stage.rollouts(stage.first_model(spec))

    async def waits() -> bool:
        return (await trainer.statuses())[0].state == common_pb.BINDING_STATE_ACCUMULATING

    await until(waits)
    for query, trajectory, samples in rollouts:
        await asyncio.sleep(0.1)
        await stage.append(query, trajectory, samples)
    events = await asyncio.wait_for(running, PATIENCE)
    assert events[-1].commit.num_samples == 8
    assert events[-1].commit.metrics["train/wait_seconds"] > 0
    states = [event.state for event in events]
    assert states[0] in (common_pb.BINDING_STATE_IDLE, common_pb.BINDING_STATE_ACCUMULATING)
    assert events[-1].micro_batches >= 2


async def test_an_empty_step_keeps_the_version(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    for query, trajectory, _ in stage.rollouts(stage.first_model(spec)):
        await stage.append(query, trajectory, [])
    commit = await trainer.run(0, 0)
    assert commit.outcome == store_pb.STEP_OUTCOME_EMPTY
    assert commit.weights == first


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
async def test_a_nan_loss_skips_the_step(stage: TrainingStage, broken: float) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    before = {n: t.clone() for n, t in stage.weights(first).items()}
    rollouts = stage.rollouts(stage.first_model(spec))
    for index, (query, trajectory, samples) in enumerate(rollouts):
        if index == 1:
            samples = [with_logprob(samples[0], broken)]
        await stage.append(query, trajectory, samples)
    commit = await trainer.run(0, 0)
    assert commit.outcome == store_pb.STEP_OUTCOME_SKIPPED
    assert "loss" in commit.reason or "gradient" in commit.reason
    assert commit.weights == first
    binding = trainer.worker.bindings.bound[(stage.job_id, "solver")]
    assert all(torch.equal(before[n], t.cpu()) for n, t in binding.learner.weights().items())
    # The job continues.
    await stage.open(1)
    await stage.play(stage.first_model(spec), step=1)
    assert (await trainer.run(1, 0)).weights.version == 1


def with_logprob(sample: store_pb.Sample, value: float) -> store_pb.Sample:
    """Return the sample with its first log-prob replaced."""
    logprobs = tensors.from_proto(sample.logprobs).copy()
    logprobs[0] = np.float32(value)
    changed = store_pb.Sample()
    changed.CopyFrom(sample)
    changed.logprobs.CopyFrom(tensors.to_proto(logprobs))
    return changed


async def test_a_step_goes_on_when_its_client_leaves(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    watching = asyncio.create_task(trainer.events(0, 0))
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    await trainer.trained(4)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    with pytest.raises(FailedPrecondition, match="in step 0"):
        await trainer.run(1, 0)
    # It comes back, and finds the result.
    again = asyncio.create_task(trainer.events(0, 0))
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    events = await again
    assert events[0].samples == 4
    assert events[-1].commit.num_samples == 8


async def test_release_gives_the_samples_back(stage: TrainingStage) -> None:
    spec = stage.spec()
    one, two = await stage.trainer(), await stage.trainer()
    await stage.open()
    first = await one.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    watching = asyncio.create_task(one.events(0, 0))
    await one.trained(4)
    await one.release()
    with pytest.raises(Aborted, match="given up"):
        await watching
    assert await one.statuses() == []
    with pytest.raises(NotFound, match="not bound"):
        await one.run(0, 0)
    await two.bind(spec, checksum=first.checksum)
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    assert (await two.run(0, 0)).num_samples == 8


async def test_a_superseded_worker_cannot_commit(stage: TrainingStage) -> None:
    """Two workers believe that they hold the policy: one commits, and each sample counts once."""
    spec = stage.spec()
    old, new = await stage.trainer(trainer_lease_seconds=0.6), await stage.trainer()
    await stage.open()
    first = await old.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    zombie = asyncio.create_task(old.events(0, 0))
    await old.trained(4)
    await new.bind(spec, checksum=first.checksum)
    running = asyncio.create_task(new.events(0, 0))
    await new.trained(4)
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    commit = (await running)[-1].commit
    assert commit.num_samples == 8
    ended = (await asyncio.gather(zombie, return_exceptions=True))[0]
    if isinstance(ended, list):  # it came back after the commit, and adopted it
        assert ended[-1].commit == commit
    else:
        assert isinstance(ended, Aborted)
    assert (await old.run(0, 0)) == commit
    assert (await old.statuses())[0].version == 1


async def test_two_policies_share_a_worker(stage: TrainingStage) -> None:
    both = ("solver", "checker")
    spec = stage.spec(policies=both)
    trainer = await stage.trainer()
    await stage.open(policies=both)
    refs = await asyncio.gather(*(trainer.bind(spec, policy) for policy in both))
    assert refs[0].checksum != refs[1].checksum
    running = asyncio.gather(*(trainer.run(0, 0, policy) for policy in both))
    await stage.play(stage.first_model(spec), policies=both)
    commits = await running
    assert [commit.weights.version for commit in commits] == [1, 1]
    assert {commit.policy for commit in commits} == set(both)


async def test_a_frozen_policy_is_published_and_not_trained(stage: TrainingStage) -> None:
    spec = stage.spec(frozen=("judge",))
    trainer = await stage.trainer()
    ref = await trainer.bind(spec, "judge")
    assert checksum_of(stage.weights(ref)) == ref.checksum
    with pytest.raises(FailedPrecondition, match="frozen"):
        await trainer.run(0, 0, "judge")
    await trainer.checkpoint(0, "judge")


async def test_bind_is_idempotent_and_publishes_again(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    first = await trainer.bind(spec)
    stage.transfer.delete(first.key)
    assert await trainer.bind(spec, checksum=first.checksum) == first
    stage.weights(first)
    # A corrupt publication counts as none.
    path = stage.root / "transfer" / first.key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other = await stage.trainer()
    second = await other.bind(spec, checksum=first.checksum)
    assert second.trained_on.trainer not in ("", first.trained_on.trainer)
    first.trained_on.CopyFrom(second.trained_on)
    assert second == first
    stage.weights(second)


async def test_bind_refuses_what_it_cannot_restore(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.bind(spec, version=3, checksum="ab" * 16)
    assert caught.value.kind == "state_not_found"
    assert "data_dir" in str(caught.value.remedy)
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.bind(spec, checksum="ab" * 16)
    assert caught.value.kind == "weights_changed"
    with pytest.raises(InvalidArgument, match="no policy"):
        await trainer.bind(spec, "nobody")
    assert await trainer.statuses() == []


async def test_a_checkpoint_loads_with_transformers(stage: TrainingStage) -> None:
    spec = stage.spec(checkpoint={"keep": 1})
    trainer = await stage.trainer()
    await trainer.bind(spec)
    model = stage.first_model(spec)
    weights = None
    for step in range(2):
        await stage.open(step, version=step)
        await stage.play(model, step=step)
        weights = (await trainer.run(step, step)).weights
    old = await trainer.checkpoint(1)
    new = await trainer.checkpoint(2)
    assert new.parts[-4:] == (stage.job_id, "checkpoints", "solver", "v2")
    assert not old.exists()
    assert await trainer.checkpoint(2) == new
    await trainer.release()
    assert stage.transfer.keys() == [f"{stage.job_id}/solver/weights@2"]
    assert weights is not None
    await trainer.bind(spec, version=2, checksum=weights.checksum)
    loaded = AutoModelForCausalLM.from_pretrained(new)
    assert checksum_of(dict(loaded.named_parameters())) == weights.checksum
    assert len(AutoTokenizer.from_pretrained(new)) == 64
    with pytest.raises(FailedPrecondition, match="not kept"):
        await trainer.checkpoint(0)


def test_full_collections_do_not_walk_what_the_process_imported(tmp_path: Path) -> None:
    program = (
        "import gc, sys; from pathlib import Path\n"
        "from services.chassis.telemetry import Telemetry\n"
        "from services.trainer.__main__ import make_service\n"
        "from services.trainer.settings import TrainerSettings\n"
        "settings = TrainerSettings(transfer_dir=Path(sys.argv[1]), trainer_device='cpu')\n"
        "service = make_service(settings, Telemetry('trainer'))\n"
        "print(gc.get_freeze_count(), len(gc.get_objects()))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    frozen, walked = map(int, ran.stdout.split()[-2:])
    assert walked < frozen / 10
