"""States that are written in the background: the same bits after any death or full disk."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.state.durability import Durability, HostCopy
from services.trainer.state.training_state import StateStore, TrainingState
from tests.trainer import dying
from tests.trainer.doomed import doomed
from tests.trainer.learning.test_lora import lora_spec
from tests.trainer.stage import Trainer, TrainingStage, fill_up
from troupe.job import JobSpec
from troupe.rpc import DataLoss, ResourceExhausted, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

STEPS = 7


def spec_of(stage: TrainingStage, every: int | None = 3, **changes: Any) -> JobSpec:
    """A deterministic job; `every`: None for states that are written before each commit."""
    pipeline = {
        "steps": 20,
        "queries_per_step": 2,
        "micro_batch_samples": 3,
        "deterministic": True,
        **changes.pop("pipeline", {}),
    }
    state = {"background": False} if every is None else {"every": every}
    return stage.spec(pipeline=pipeline, state=state, **changes)


async def step(job: TrainingStage, trainer: Trainer, number: int) -> store_pb.StepCommit:
    await job.open(number, version=number)
    await job.play(job.first_model(spec_of(job)), step=number, version=number)
    return await trainer.run(number, number)


async def undisturbed(stage: TrainingStage, spec: JobSpec, steps: int = STEPS) -> list[str]:
    """Return the checksums of the same job's versions with each state written before its commit."""
    quiet, trainer = await stage.sibling()
    found = [(await trainer.bind(spec)).checksum]
    found += [(await step(quiet, trainer, n)).weights.checksum for n in range(steps)]
    return found


def versions_on_disk(stage: TrainingStage, root: str = "runs") -> list[int]:
    return StateStore(stage.root / root, stage.job_id, "solver").versions()


async def described(stage: TrainingStage) -> store_pb.DescribeKeptRowsResponse:
    request = store_pb.DescribeKeptRowsRequest(job_id=stage.job_id, policy="solver")
    found: store_pb.DescribeKeptRowsResponse = await stage.store.DescribeKeptRows(request)
    return found


async def newest(stage: TrainingStage, first: str) -> common_pb.WeightsRef:
    """Return the committed version from the store."""
    found = common_pb.WeightsRef(version=0, checksum=first)
    for number in range(STEPS):
        status = await stage.store.GetStep(
            store_pb.GetStepRequest(job_id=stage.job_id, step=number)
        )
        if not status.commits:
            break
        found = status.commits[0].weights
    return found


async def settle(trainer: Trainer, stage: TrainingStage) -> Durability:
    """Wait until nothing is being written. (In a thread: the writer calls the store, which is in
    this process.)"""
    binding = trainer.worker.bindings.bound[(stage.job_id, "solver")]
    found: Durability = binding.versions.durability
    await asyncio.to_thread(found.settle)
    return found


async def go_on(
    stage: TrainingStage, trainer: Trainer, spec: JobSpec, known: common_pb.WeightsRef
) -> list[store_pb.StepCommit]:
    """Bind the committed version and make the remaining steps."""
    bound = await trainer.bind(spec, version=known.version, checksum=known.checksum)
    assert bound.checksum == known.checksum
    return [await step(stage, trainer, number) for number in range(known.version, STEPS)]


async def test_steps_that_compare_with_the_first_version_are_computed_again_with_it(
    stage: TrainingStage, store_address: str
) -> None:
    # Several steps: in the first one the weights are still those of the first version.
    spec = spec_of(stage, every=9, algorithm={"kl_coefficient": 1.0})
    async with doomed(stage, store_address, "after version 5 was published") as trainer:
        first = (await trainer.bind(spec)).checksum
        for number in range(4):
            await step(stage, trainer, number)
        with pytest.raises(TroupeError):
            await step(stage, trainer, 4)
    known = await newest(stage, first)
    assert known.version == 4
    assert versions_on_disk(stage) == [0]
    bound = await (await stage.trainer()).bind(spec, version=4, checksum=known.checksum)
    assert bound.checksum == known.checksum


@pytest.fixture(scope="module")
def quiet() -> list[str]:
    """Return the checksums of `undisturbed`."""
    return []


@pytest.mark.slow
@pytest.mark.parametrize("point", list(dying.BEHIND))
async def test_steps_lost_between_durable_states_are_computed_again_bit_for_bit(
    stage: TrainingStage, store_address: str, quiet: list[str], point: str
) -> None:
    if not quiet:
        quiet.extend(await undisturbed(stage, spec_of(stage, None)))
    spec = spec_of(stage)
    await stage.open()
    deaths = [point]
    if point == "after steps were computed again":
        deaths.insert(0, "after version 5 was published")
    for death in deaths:
        async with doomed(stage, store_address, death) as trainer:
            known = await newest(stage, quiet[0])
            with pytest.raises(TroupeError):
                await go_on(stage, trainer, spec, known)
    known = await newest(stage, quiet[0])
    assert known.checksum == quiet[known.version]
    trainer = await stage.trainer()
    commits = await go_on(stage, trainer, spec, known)
    stage.weights(commits[-1].weights)
    found = [commit.weights.checksum for commit in commits]
    assert found == quiet[known.version + 1 :], "exactly the rows, order and draws of before"
    assert all(commit.num_samples == 8 for commit in commits)
    await settle(trainer, stage)
    left = stage.root / "runs" / stage.job_id / "state/solver"
    assert not [path.name for path in left.iterdir() if path.name.startswith(".")]
    audit = await stage.store.AuditTables(store_pb.AuditTablesRequest(job_id=stage.job_id))
    assert list(audit.violations) == []


async def test_states_are_written_every_few_steps_and_rows_go_with_them(
    stage: TrainingStage,
) -> None:
    trainer = await stage.trainer()
    await trainer.bind(spec_of(stage))
    for number in range(3):
        commit = await step(stage, trainer, number)
        assert commit.metrics["train/state_steps_behind"] == number + 1
    await settle(trainer, stage)
    found = await described(stage)
    assert (found.durable_version, found.durable_checksum) == (3, commit.weights.checksum)
    assert (len(found.versions), found.kept_bytes) == (0, 0)
    assert versions_on_disk(stage) == [0, 3]
    commit = await step(stage, trainer, 3)
    assert commit.metrics["train/state_copy_seconds"] > 0
    assert commit.metrics["train/state_write_seconds"] > 0
    found = await described(stage)
    assert [one.commit.weights.version for one in found.versions] == [4]
    assert versions_on_disk(stage) == [0, 3]
    # A checkpoint needs the state at once.
    await trainer.checkpoint(4)
    assert versions_on_disk(stage) == [0, 3, 4]
    assert not (await described(stage)).versions
    # So does a policy that leaves.
    await step(stage, trainer, 4)
    await trainer.release()
    assert 5 in versions_on_disk(stage)
    assert (await described(stage)).durable_version == 5


@pytest.mark.slow
async def test_a_suspended_policy_goes_on_elsewhere_and_a_lost_one_is_computed_again(
    stage: TrainingStage,
) -> None:
    quiet = await undisturbed(stage, spec_of(stage, None))
    spec = spec_of(stage, every=50)
    one, other = await stage.trainer(), await stage.trainer()
    await one.bind(spec)
    for number in range(2):
        await step(stage, one, number)
    state = await one.suspend()
    await other.resume(spec, state, quiet[2])
    commit = await step(stage, other, 2)
    assert commit.weights.checksum == quiet[3]
    assert commit.metrics["train/state_steps_behind"] == 3
    # The first worker binds a version that is only in the other one's memory.
    bound = await one.bind(spec, version=3, checksum=quiet[3])
    assert bound.checksum == quiet[3]
    commit = await step(stage, one, 3)
    assert commit.weights.checksum == quiet[4]
    assert commit.metrics["train/state_recomputed_steps"] == 3
    assert (await settle(one, stage)).durable == 3, "written at once, for the next crash"


@pytest.mark.slow
@pytest.mark.parametrize("gang", [1, 2])
async def test_steps_before_a_resume_are_computed_again_at_their_own_rate(
    stage: TrainingStage, gang: int
) -> None:
    """Also under more steps, which stretch a falling schedule."""
    rates = {"lr": 1e-3, "schedule": "linear"}
    changed = {"lr": 2e-3, "schedule": "cosine"}

    def job(optimizer: dict[str, Any], steps: int) -> JobSpec:
        pipeline = {"steps": steps, "deterministic": gang == 1}
        found = spec_of(stage, every=50, pipeline=pipeline).model_dump(
            mode="json", exclude_unset=True
        )
        found["policies"]["solver"] |= {"optimizer": optimizer, "trainer": {"gang": gang}}
        return JobSpec.model_validate(found)

    one = await stage.trainer(gang_ranks=gang)
    await one.bind_again(job(rates, 20))
    commits = [await step(stage, one, number) for number in range(3)]
    # The worker is lost before it wrote the state, and the job is resumed with other settings.
    other, last = await stage.trainer(gang_ranks=gang), commits[-1].weights
    again = await other.bind_again(job(changed, 60), version=3, checksum=last.checksum)
    assert again.checksum == last.checksum
    commit = await step(stage, other, 3)
    assert commit.metrics["train/state_recomputed_steps"] == 3
    assert commit.metrics["lr"] > 1.9e-3


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_a_policy_begins_with_weights_and_optimizer_from_other_devices(
    stage: TrainingStage, before: int, after: int
) -> None:
    """A policy of a gang begins with the state of one device, and vice versa."""

    def job(gang: int, **changes: Any) -> JobSpec:
        found = spec_of(stage, None, pipeline={"deterministic": False}).model_dump(
            mode="json", exclude_unset=True
        )
        found["policies"]["solver"] |= {"trainer": {"gang": gang}, **changes}
        return JobSpec.model_validate(found)

    one = await stage.trainer(gang_ranks=before)
    await one.bind_again(job(before))
    for number in range(2):
        commit = await step(stage, one, number)
    quiet, other = await stage.sibling(gang_ranks=after)
    given = {"job": stage.job_id, "policy": "solver", "version": 2, "optimizer": True}
    bound = await other.bind_again(job(after, init_from=given))
    assert (bound.version, bound.checksum) == (0, commit.weights.checksum)
    root = stage.root / "runs"
    mine = StateStore(root, quiet.job_id, "solver").load(0)
    theirs = StateStore(root, stage.job_id, "solver").load(2)
    for name in ("weights", "moments"):
        ours, its = getattr(mine, name), getattr(theirs, name)
        assert ours.keys() == its.keys()
        assert all(torch.equal(ours[key], its[key]) for key in its), name
    assert mine.frontier.step == -1
    assert (await step(quiet, other, 0)).weights.version == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "minibatches"])
async def test_learners_of_other_kinds_compute_lost_steps_again(
    stage: TrainingStage, kind: str
) -> None:
    changes: dict[str, Any] = {}
    if kind == "lora":
        adapted = lora_spec(stage.tokenizer, ["solver"]).model_dump(mode="json")
        changes["policies"] = adapted["policies"]
    else:
        changes["algorithm"] = {"epochs": 2, "minibatches": 2}
    base = spec_of(stage, pipeline={"mode": "sync"}).model_dump(mode="json", exclude_unset=True)
    spec = JobSpec.model_validate({**base, **changes, "state": {"every": 50}})
    before = JobSpec.model_validate({**base, **changes, "state": {"background": False}})
    quiet = await undisturbed(stage, before, 4)
    one, other = await stage.trainer(), await stage.trainer()
    await one.bind(spec)
    for number in range(3):
        await step(stage, one, number)
    assert (await other.bind(spec, version=3, checksum=quiet[3])).checksum == quiet[3]
    assert (await step(stage, other, 3)).weights.checksum == quiet[4]


@pytest.mark.slow
async def test_a_gang_computes_lost_steps_again(stage: TrainingStage) -> None:
    """Its ranks write every third state behind the steps, and rows are kept in between."""
    base = spec_of(stage, pipeline={"deterministic": False}).model_dump(
        mode="json", exclude_unset=True
    )
    base["policies"]["solver"]["trainer"] = {"gang": 2}
    spec = JobSpec.model_validate({**base, "state": {"every": 3}})
    one = await stage.trainer(gang_ranks=2)
    await one.bind_again(spec)
    commits = [await step(stage, one, number) for number in range(5)]
    await settle(one, stage)
    assert versions_on_disk(stage) == [0, 3]
    assert "train/state_copy_seconds" in commits[3].metrics
    found = await described(stage)
    assert found.durable_version == 3
    assert [one.commit.weights.version for one in found.versions] == [4, 5]
    other, last = await stage.trainer(gang_ranks=2), commits[-1].weights
    again = await other.bind_again(spec, version=5, checksum=last.checksum)
    assert again.checksum == last.checksum
    await settle(other, stage)
    assert versions_on_disk(stage) == [3, 5], "written at once, for the next crash"
    assert (await step(stage, other, 5)).weights.version == 6


async def test_values_by_reference_are_kept_with_their_rows(stage: TrainingStage) -> None:
    """The values themselves are deleted with the commit, as they always were."""
    pipeline = {"required_columns": ["reference_logprobs"], "deterministic": True}
    spec = spec_of(stage, 50, algorithm={"kl_coefficient": 0.1}, pipeline=pipeline)
    one, other = await stage.trainer(), await stage.trainer()
    await stage.open(required_columns=["reference_logprobs"])
    await one.bind(spec)
    keys = []
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec)):
        sample, key = samples[0], f"{stage.job_id}/columns/{samples[0].sample_id}"
        length = sample.response_ids.shape[0]
        value = np.linspace(-2, -1, length, dtype=np.float32)
        stage.transfer.set(key, {"value": torch.from_numpy(value)})
        sample.columns["reference_logprobs"].ref = key
        keys.append(key)
        await stage.append(query, trajectory, samples)
    commit = await one.run(0, 0)
    assert not any(stage.transfer.exists(key) for key in keys)
    checksum = commit.weights.checksum
    assert (await other.bind(spec, version=1, checksum=checksum)).checksum == checksum


@pytest.mark.slow
async def test_a_disk_that_fills_while_a_state_is_written_loses_nothing(
    stage: TrainingStage, small_disk: Path
) -> None:
    quiet = await undisturbed(stage, spec_of(stage, None))
    spec = spec_of(stage, every=2)
    trainer = await stage.trainer(data_dir=small_disk)
    await trainer.bind(spec)
    await step(stage, trainer, 0)
    ballast = fill_up(small_disk, 40_000)
    await step(stage, trainer, 1)
    durability = await settle(trainer, stage)
    assert isinstance(durability.failure, ResourceExhausted)
    assert [one.commit.weights.version for one in (await described(stage)).versions] == [1, 2]
    # The next step writes before its commit, and raises the error, for which the job pauses.
    await stage.open(2, version=2)
    await stage.play(stage.first_model(spec), step=2, version=2)
    with pytest.raises(ResourceExhausted) as caught:
        await trainer.run(2, 2)
    assert (caught.value.kind, caught.value.field) == ("storage_full", "data_dir")
    # Another worker finds everything, as soon as there is room.
    ballast.unlink()
    again = await stage.trainer(data_dir=small_disk)
    assert (await again.bind(spec, version=2, checksum=quiet[2])).checksum == quiet[2]
    assert (await again.run(2, 2)).weights.checksum == quiet[3]
    assert (await step(stage, again, 3)).weights.checksum == quiet[4]


@pytest.mark.slow
async def test_half_written_states_are_ignored_and_swept(stage: TrainingStage) -> None:
    quiet = await undisturbed(stage, spec_of(stage, None))
    spec = spec_of(stage, every=50)
    one, other = await stage.trainer(), await stage.trainer(data_dir=stage.root / "copy")
    await one.bind(spec)
    for number in range(2):
        await step(stage, one, number)
    # A killed writer leaves some files, one of them incomplete, under a temporary name.
    shutil.copytree(stage.root / "runs", stage.root / "copy")
    states = stage.root / "copy" / stage.job_id / "state/solver"
    whole = next(states.glob("v0-*"))
    left = states / f".v2-{quiet[2][:12]}.0badf00d.tmp"
    shutil.copytree(whole, left)
    weights = (left / "weights.safetensors").read_bytes()
    (left / "weights.safetensors").write_bytes(weights[: len(weights) // 2])
    (left / "state.json").unlink()
    assert (await other.bind(spec, version=2, checksum=quiet[2])).checksum == quiet[2]
    await settle(other, stage)
    assert not left.exists()
    assert versions_on_disk(stage, "copy") == [0, 2]
    assert (await step(stage, other, 2)).weights.checksum == quiet[3]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_weights_that_differ_from_the_committed_ones_are_refused(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """As on a device whose sums depend on time. The published weights keep their version; without
    them, or where bits are promised, the policy is not bound."""
    spec = spec_of(stage, every=50, pipeline={"deterministic": deterministic})
    one, other = await stage.trainer(), await stage.trainer()
    await one.bind(spec)
    for number in range(2):
        committed = (await step(stage, one, number)).weights
    apply = Learner.apply

    def rounded(self: Learner, *args: Any) -> Any:
        outcome = apply(self, *args)
        with torch.no_grad():
            next(iter(self.weights().values())).mul_(1 + 1e-6)
        return outcome

    monkeypatch.setattr(Learner, "apply", rounded)
    if deterministic:
        with pytest.raises(DataLoss) as caught:
            await other.bind(spec, version=2, checksum=committed.checksum)
        assert caught.value.kind == "state_not_reproduced"
        assert "state.background" in (caught.value.remedy or "")
        return
    bound = await other.bind(spec, version=2, checksum=committed.checksum)
    assert (bound.version, bound.checksum) == (2, committed.checksum)
    monkeypatch.undo()
    stage.weights(bound)
    # Steps continue from the recomputed state, which is version 2's state from now on.
    assert (await step(stage, other, 2)).weights.version == 3
    await one.release()
    stage.transfer.delete(committed.key)
    monkeypatch.setattr(Learner, "apply", rounded)
    third = await stage.trainer(data_dir=stage.root / "elsewhere")
    with pytest.raises(TroupeError):
        await third.bind(spec, version=2, checksum=committed.checksum)


def test_a_copy_shares_no_memory_and_reuses_its_own() -> None:
    copy = HostCopy(torch.device("cpu"))
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    first = copy.take(tensors)
    tensors["a"].zero_()
    assert first["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    before = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = copy.take({**tensors, "c": torch.ones(2)})
    assert {name: second[name].data_ptr() for name in before} == before
    assert copy.fits({"c": torch.ones(2)})
    assert not copy.fits({"d": torch.empty(1 << 44, dtype=torch.uint8, device="meta")})
    copy.give_back()
    assert copy.take({"a": torch.ones(3)})["a"].shape == (3,)


@pytest.mark.parametrize(
    "error", [MemoryError("none"), RuntimeError("CUDA error"), OSError(errno.EIO, "broken")]
)
async def test_the_next_step_writes_and_the_policy_can_leave_whatever_ended_the_writer(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    trainer = await stage.trainer()
    await trainer.bind(spec_of(stage, every=1))
    save = StateStore.save

    def fails(self: StateStore, state: TrainingState) -> Path:
        if threading.current_thread().name.startswith("state"):
            raise error
        return save(self, state)

    monkeypatch.setattr(StateStore, "save", fails)
    await step(stage, trainer, 0)
    assert (await settle(trainer, stage)).failure is error
    await step(stage, trainer, 1)
    assert versions_on_disk(stage) == [0, 2], "the next step writes before its commit"
    await step(stage, trainer, 2)
    await trainer.release()
    assert 3 in versions_on_disk(stage)


async def test_a_state_is_written_at_once_when_memory_has_become_short(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five policies may count the same free memory, and pinned memory has its own limits."""
    copy, most = HostCopy(torch.device("cpu")), torch.zeros(()).expand(1 << 60)
    assert not copy.reserve({"a": torch.ones(2), "b": most})
    assert copy.take({"b": most}) is None
    assert copy.take({"a": torch.ones(2)}) is not None
    zeros = torch.zeros

    def none_left(*args: Any, **options: Any) -> torch.Tensor:
        if (
            threading.current_thread().name.startswith(("state", "compute"))
            and "pin_memory" in options
        ):
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args, **options)

    trainer = await stage.trainer()
    await trainer.bind(spec_of(stage, every=1))
    monkeypatch.setattr(torch, "zeros", none_left)
    for number in range(2):
        await step(stage, trainer, number)
        assert (await settle(trainer, stage)).durable == number + 1
    await trainer.release()


async def test_rows_may_be_read_for_as_long_as_their_step_may_take(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of thousands of long rows computes for longer than any fixed limit of a call."""
    spec = spec_of(stage, every=50)
    one, other = await stage.trainer(), await stage.trainer()
    await one.bind(spec)
    committed = (await step(stage, one, 0)).weights
    given: list[float] = []
    read = store_grpc.ExperienceStoreStub.__init__

    def watched(self: Any, channel: Any) -> None:
        read(self, channel)
        call = self.ReadKeptRows

        def called(request: Any, timeout: float) -> Any:
            given.append(timeout)
            return call(request, timeout=timeout)

        self.ReadKeptRows = called

    monkeypatch.setattr(store_grpc.ExperienceStoreStub, "__init__", watched)
    bound = await other.bind(spec, version=1, checksum=committed.checksum)
    assert bound.checksum == committed.checksum
    assert given == [spec.limits.step_seconds]
