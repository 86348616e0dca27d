"""SIGKILL at every point of a step: version k or k + 1 everywhere, and the same bits after."""

from __future__ import annotations

import pytest

from tests.trainer import dying
from tests.trainer.doomed import doomed
from tests.trainer.stage import Trainer, TrainingStage
from troupe.job import JobSpec
from troupe.rpc import TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

COMMITTED = {"after the commit", "before old versions go", "after old versions went"}


def _spec(stage: TrainingStage) -> JobSpec:
    pipeline = {
        "steps": 10,
        "queries_per_step": 2,
        "micro_batch_samples": 3,
        "deterministic": True,
    }
    return stage.spec(pipeline=pipeline)


async def _step(job: TrainingStage, trainer: Trainer, step: int) -> store_pb.StepCommit:
    await job.open(step, version=step)
    await job.play(job.first_model(_spec(job)), step=step, version=step)
    return await trainer.run(step, step)


async def _die_in_first_step(stage: TrainingStage, store_address: str, point: str) -> str:
    """The checksum of version 0; returns once the process is dead."""
    async with doomed(stage, store_address, point) as trainer:
        first = await trainer.bind(_spec(stage))
        with pytest.raises(TroupeError):
            await _step(stage, trainer, 0)
    return first.checksum


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Return the checksums of the versions of a run without faults."""
    return []


@pytest.mark.parametrize("point", list(dying.POINTS))
async def test_one_version_is_left_everywhere_after_a_death(
    stage: TrainingStage, store_address: str, undisturbed: list[str], point: str
) -> None:
    if not undisturbed:
        quiet, trainer = await stage.sibling()
        undisturbed.append((await trainer.bind(_spec(quiet))).checksum)
        steps = [await _step(quiet, trainer, step) for step in range(2)]
        undisturbed.extend(commit.weights.checksum for commit in steps)
    first = await _die_in_first_step(stage, store_address, point)
    # The store decides, and its version is one or the other.
    found = await stage.store.GetStep(store_pb.GetStepRequest(job_id=stage.job_id, step=0))
    assert bool(found.commits) == (point in COMMITTED)
    version, checksum = 0, first
    if found.commits:
        version, checksum = 1, found.commits[0].weights.checksum
        stage.weights(found.commits[0].weights)  # engines can load the committed version
    trainer = await stage.trainer()
    await trainer.bind(_spec(stage), version=version, checksum=checksum)
    again = await trainer.run(0, version)
    assert (again.num_samples, again.weights.version) == (8, 1)
    assert again.metrics["samples"] == 8
    after = await _step(stage, trainer, 1)
    assert [first, again.weights.checksum, after.weights.checksum] == undisturbed
    await trainer.checkpoint(2)  # the state is written behind the step
    # Nothing is half written or superfluous.
    states = stage.root / "runs" / stage.job_id / "state/solver"
    assert sorted(path.name.split("-")[0] for path in states.iterdir()) == ["v1", "v2"]
    keys = stage.transfer.keys(f"{stage.job_id}/solver/")
    assert [key.partition("@")[2] for key in keys] == ["1", "2"]
