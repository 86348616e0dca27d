"""Policies suspended in the middle of a step, and resumed elsewhere: bits, leases, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import make_rollout
from tests.trainer.stage import Trainer, TrainingStage, fill_up
from troupe.job import JobSpec
from troupe.rpc import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TroupeError,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb

Events = asyncio.Task[list[trainer_pb.StepEvent]]


def spec_of(stage: TrainingStage, **pipeline: Any) -> JobSpec:
    return stage.spec(
        pipeline={"steps": 10, "queries_per_step": 2, "micro_batch_samples": 3, **pipeline}
    )


async def half_a_step(job: TrainingStage, trainer: Trainer, spec: JobSpec) -> Events:
    """Return a running step that has computed the first half of its samples."""
    await trainer.bind(spec)
    await job.open()
    await rest(job, spec, "q0")
    running = asyncio.create_task(trainer.events(0, 0))
    await trainer.trained(3)
    return running


async def rest(job: TrainingStage, spec: JobSpec, query: str = "q1") -> None:
    for name, trajectory, samples in job.rollouts(job.first_model(spec)):
        if name == query:
            await job.append(name, trajectory, samples)


async def audited(stage: TrainingStage) -> store_pb.PolicyAudit:
    """Check that no sample is lost or trained twice."""
    audit = await stage.store.AuditTables(store_pb.AuditTablesRequest(job_id=stage.job_id))
    assert list(audit.violations) == []
    (policy,) = audit.policies
    assert (policy.lost, policy.duplicated) == (0, 0)
    return policy


async def undisturbed(stage: TrainingStage, spec: JobSpec) -> store_pb.StepCommit:
    """The same step in a separate job."""
    quiet, trainer = await stage.sibling()
    running = await half_a_step(quiet, trainer, spec)
    await rest(quiet, spec)
    return (await running)[-1].commit


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_step_that_moves_to_another_worker_ends_with_the_same_bits(
    stage: TrainingStage, deterministic: bool
) -> None:
    spec = spec_of(stage, deterministic=deterministic)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    running = await half_a_step(stage, here, spec)
    state = await here.suspend()
    with pytest.raises(TroupeError) as stopped:
        await running
    assert stopped.value.kind == "step_suspended"
    # Its device is not needed: the state's place is reported.
    (status,) = await here.statuses()
    assert status.state == common_pb.BINDING_STATE_SUSPENDED
    assert (state.version, state.step, state.samples) == (0, 0, 4 if deterministic else 3)
    assert state.num_bytes == stage.transfer.manifest(state.key).num_bytes
    assert await here.suspend() == state, "repeated"
    # The leases are held in the meantime, and new samples are still collected.
    await rest(stage, spec)
    await there.prefetch(spec, state)
    (status,) = await there.statuses()
    assert status.prefetched
    await there.resume(spec, state)
    assert not stage.transfer.exists(state.key), "it has one owner"
    commit = await there.run(0, 0)
    assert commit.num_samples == 8
    same = await undisturbed(stage, spec)
    assert commit.weights.checksum == same.weights.checksum
    for name in same.metrics:
        if "seconds" not in name:
            assert commit.metrics[name] == same.metrics[name], name
    assert (await audited(stage)).trained == 8
    # And from there on.
    await stage.open(1, version=1)
    await stage.play(stage.first_model(spec), step=1, version=1)
    assert (await there.run(1, 1)).weights.version == 2


async def test_a_policy_that_leaves_and_returns_to_a_worker_reuses_its_memory(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer()
    running = await half_a_step(stage, trainer, spec)
    for _ in range(3):
        state = await trainer.suspend()
        await asyncio.gather(running, return_exceptions=True)
        await trainer.resume(spec, state)
        assert await trainer.resume(spec, state), "repeated"
        running = asyncio.create_task(trainer.events(0, 0))
        await trainer.trained(3)
    await rest(stage, spec)
    commit = (await running)[-1].commit
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    (status,) = await trainer.statuses()
    assert status.swaps == 6
    assert status.swap_seconds > 0


async def test_a_state_that_was_fetched_ahead_is_not_taken_for_a_later_one(
    stage: TrainingStage,
) -> None:
    """Their tensors are equal if samples changed no gradient; their claims differ."""
    values = spec_of(stage, queries_per_step=4).model_dump()
    values["policies"]["solver"]["simulated"] = {"step_seconds": 0.0}
    spec = JobSpec.model_validate(values)

    async def play(query: str) -> None:
        for number in range(4):
            name = f"{query}-t{number}"
            sample = make_rollout(query, name, reward=float(number % 2), version=0)
            await stage.append(query, name, [sample])

    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    await here.bind(spec)
    await stage.open(queries=("q0", "q1", "q2", "q3"))
    await play("q0")
    running = asyncio.create_task(here.events(0, 0))
    await here.trained(3)
    first = await here.suspend()
    await asyncio.gather(running, return_exceptions=True)
    await there.prefetch(spec, first)
    # It continues here after all.
    await here.resume(spec, first)
    await play("q1")
    await play("q2")
    running = asyncio.create_task(here.events(0, 0))
    await here.trained(12)
    second = await here.suspend()
    await asyncio.gather(running, return_exceptions=True)
    assert second.checksum == first.checksum, "else this says nothing"
    await there.prefetch(spec, second)
    await there.resume(spec, second)
    await play("q3")
    assert (await there.run(0, 0)).num_samples == 16
    assert (await audited(stage)).trained == 16


async def test_a_step_suspended_again_before_it_continued_loses_nothing(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    running = await half_a_step(stage, here, spec)
    first = await here.suspend()
    await asyncio.gather(running, return_exceptions=True)
    await there.resume(spec, first)
    second = await there.suspend()
    assert (second.step, second.samples, second.claimant) == (0, 3, first.claimant)
    await here.resume(spec, second)
    await rest(stage, spec)
    events = await here.events(0, 0)
    assert events[0].samples in (0, 3), "before it began, or where it was"
    assert all(event.samples >= 3 for event in events[1:])
    checksum = events[-1].commit.weights.checksum
    assert checksum == (await undisturbed(stage, spec)).weights.checksum


async def test_a_policy_suspended_between_steps_resumes_without_a_step(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer()
    await trainer.bind(spec)
    await stage.open()
    await stage.play(stage.first_model(spec))
    first = await trainer.run(0, 0)
    state = await trainer.suspend()
    assert not state.HasField("step")
    weights = await trainer.resume(spec, state, first.weights.checksum)
    assert weights == first.weights
    await stage.open(1, version=1)
    await stage.play(stage.first_model(spec), step=1, version=1)
    assert (await trainer.run(1, 1)).weights.version == 2


async def test_a_suspension_waits_for_a_step_that_is_past_its_last_sample(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer()
    await trainer.bind(spec)
    await stage.open()
    await stage.play(stage.first_model(spec))
    suspension: list[asyncio.Task[trainer_pb.SuspendedState]] = []
    (binding,) = trainer.worker.bindings.bound.values()
    persist, loop = binding.versions.persist, asyncio.get_running_loop()

    def suspended_meanwhile(*args: Any, **how: Any) -> common_pb.WeightsRef:
        def ask() -> None:
            suspension.append(asyncio.create_task(trainer.suspend()))

        loop.call_soon_threadsafe(ask)
        weights: common_pb.WeightsRef = persist(*args, **how)
        return weights

    monkeypatch.setattr(binding.versions, "persist", suspended_meanwhile)
    commit = await trainer.run(0, 0)
    assert commit.weights.version == 1
    state = await suspension[0]
    assert (state.version, state.HasField("step")) == (1, False)


@pytest.mark.slow
async def test_a_step_whose_leases_ran_out_in_suspension_begins_again(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer(trainer_lease_seconds=0.4)
    running = await half_a_step(stage, trainer, spec)
    state = await trainer.suspend()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.6)  # the lease itself is what runs out
    await rest(stage, spec)
    await trainer.resume(spec, state)
    commit = await trainer.run(0, 0)
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    assert (await audited(stage)).trained == 8


async def test_a_step_that_another_worker_has_begun_is_not_counted_twice(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    running = await half_a_step(stage, here, spec)
    state = await here.suspend()
    await asyncio.gather(running, return_exceptions=True)
    await rest(stage, spec)
    await there.bind(spec)  # again, without the suspended state
    other = await there.run(0, 0)
    with pytest.raises(NotFound) as gone:  # a new binding forgets the state that waited on its host
        await here.resume(spec, state)
    assert (gone.value.kind, gone.value.field) == ("suspended_state_gone", "state.key")
    assert other.num_samples == (await audited(stage)).trained == 8


@pytest.fixture
async def suspended(
    stage: TrainingStage,
) -> tuple[Trainer, JobSpec, trainer_pb.SuspendedState]:
    spec = spec_of(stage)
    trainer = await stage.trainer()
    running = await half_a_step(stage, trainer, spec)
    state = await trainer.suspend()
    await asyncio.gather(running, return_exceptions=True)
    return trainer, spec, state


Suspended = tuple[Trainer, JobSpec, trainer_pb.SuspendedState]


async def test_a_state_of_another_version_is_refused_and_kept(suspended: Suspended) -> None:
    trainer, spec, state = suspended
    with pytest.raises(FailedPrecondition) as refused:
        await trainer.resume(spec, state, version=7)
    assert refused.value.kind == "suspended_state_mismatch"
    assert (refused.value.field, refused.value.value) == ("state.version", "0")
    assert refused.value.remedy
    await trainer.resume(spec, state)


async def test_a_state_that_is_gone_is_an_error_and_the_step_begins_again(
    stage: TrainingStage, suspended: Suspended
) -> None:
    trainer, spec, state = suspended
    stage.transfer.delete(state.key)
    with pytest.raises(NotFound) as gone:
        await trainer.resume(spec, state)
    assert (gone.value.kind, gone.value.value) == ("suspended_state_gone", state.key)
    await trainer.bind(spec)
    await rest(stage, spec)
    commit = await trainer.run(0, 0)
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    assert (await audited(stage)).trained == 8


async def test_a_suspended_state_with_other_bytes_is_refused(
    stage: TrainingStage, suspended: Suspended
) -> None:
    trainer, spec, state = suspended
    tensors, manifest = stage.transfer.get(state.key)
    name = next(name for name in tensors if name.startswith("weights/"))
    tensors[name].view(-1)[0] += 1
    stage.transfer.set(state.key, tensors, metadata=manifest.metadata)
    with pytest.raises(DataLoss) as changed:
        await trainer.resume(spec, state)
    assert changed.value.kind == "suspended_state_changed"


async def test_a_key_of_another_job_is_refused(suspended: Suspended) -> None:
    trainer, spec, state = suspended
    state.key = "other/solver/training@0"
    with pytest.raises(FailedPrecondition) as refused:
        await trainer.resume(spec, state)
    assert refused.value.kind == "suspended_state_mismatch"
    state.key = ""
    with pytest.raises(InvalidArgument, match="empty"):
        await trainer.resume(spec, state)


async def test_an_unbound_policy_cannot_be_suspended(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    with pytest.raises(NotFound) as refused:
        await trainer.suspend()
    assert refused.value.kind == "not_bound"


async def test_a_release_forgets_the_suspended_state(
    stage: TrainingStage, suspended: Suspended
) -> None:
    trainer, _, state = suspended
    await trainer.release()
    assert not stage.transfer.exists(state.key)
    assert await trainer.statuses() == []


async def test_a_policy_without_room_for_its_state_stays_and_its_step_continues(
    stage: TrainingStage, small_disk: Path
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer(transfer_dir=small_disk)
    running = await half_a_step(stage, trainer, spec)
    ballast = fill_up(small_disk, leave=4096)
    with pytest.raises(ResourceExhausted):
        await trainer.suspend()
    await asyncio.gather(running, return_exceptions=True)
    ballast.unlink()
    running = asyncio.create_task(trainer.events(0, 0))
    await rest(stage, spec)
    commit = (await running)[-1].commit
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    assert (await audited(stage)).trained == 8


async def test_a_policy_that_is_too_large_for_the_device_is_refused_before_it_is_loaded(
    stage: TrainingStage,
) -> None:
    trainer = await stage.trainer(trainer_memory_bytes=1000)
    with pytest.raises(FailedPrecondition) as refused:
        await trainer.bind(spec_of(stage))
    assert (refused.value.kind, refused.value.field) == (
        "policy_too_large",
        "policies.solver.model",
    )
    assert int(refused.value.value or 0) > 1000
    assert "TROUPE_TRAINER_MEMORY_BYTES" in (refused.value.remedy or "")
    assert await trainer.statuses() == []
