"""SIGKILL at every arrow of a suspension and of a resumption: the same bits, nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer import dying
from tests.trainer.doomed import doomed
from tests.trainer.stage import Trainer, TrainingStage
from tests.trainer.test_suspension import audited, half_a_step, rest, spec_of, undisturbed
from troupe.job import JobSpec
from troupe.rpc import NotFound, TroupeError
from troupe.v1.trainer_pb2 import SuspendedState

# Points at which the state has no owner: the worker that took it is dead.
TAKEN = {"after the state was taken", "after the device is filled", "in the step that goes on"}


@pytest.mark.slow
@pytest.mark.parametrize("point", list(dying.SUSPENDING))
async def test_a_step_begins_again_after_a_death_in_suspension(
    stage: TrainingStage, store_address: str, point: str
) -> None:
    spec = spec_of(stage, deterministic=True)
    async with doomed(stage, store_address, point) as trainer:
        running = await half_a_step(stage, trainer, spec)
        with pytest.raises(TroupeError):
            await trainer.suspend()  # the state's place is not reported
        await asyncio.gather(running, return_exceptions=True)
    await rest(stage, spec)
    other = await stage.trainer()
    await other.bind(spec)
    assert stage.transfer.keys(f"{stage.job_id}/solver/training@") == [], "nobody's is forgotten"
    commit = await other.run(0, 0)
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    assert (await audited(stage)).trained == 8


async def go_on(trainer: Trainer, spec: JobSpec, state: SuspendedState) -> None:
    await trainer.resume(spec, state)
    await trainer.run(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("point", list(dying.RESUMING))
async def test_a_death_in_resumption_leaves_the_state_or_the_committed_version(
    stage: TrainingStage, store_address: str, point: str
) -> None:
    spec = spec_of(stage, deterministic=True)
    first = await stage.trainer()
    running = await half_a_step(stage, first, spec)
    state = await first.suspend()
    await asyncio.gather(running, return_exceptions=True)
    await rest(stage, spec)
    async with doomed(stage, store_address, point) as trainer:
        with pytest.raises(TroupeError):
            await go_on(trainer, spec, state)
    other = await stage.trainer(worker_id="other")
    if point in TAKEN:
        with pytest.raises(NotFound):
            await other.resume(spec, state)
        await other.bind(spec)
    else:
        await other.resume(spec, state)
    commit = await other.run(0, 0)
    assert commit.weights.checksum == (await undisturbed(stage, spec)).weights.checksum
    assert (await audited(stage)).trained == commit.num_samples == 8
