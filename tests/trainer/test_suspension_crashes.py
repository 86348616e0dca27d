"""SIGKILL at every arrow of a suspension and of a resumption: the same bits, nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.trainer import dying
from tests.trainer.stage import Trainer, TrainingStage
from tests.trainer.test_suspension import audited, half_a_step, rest, spec_of, undisturbed
from troupe.job import JobSpec
from troupe.rpc import NotFound, TroupeError, connect
from troupe.v1.trainer_pb2 import SuspendedState

# Where the state is nobody's any more: whoever took it is dead.
TAKEN = {"after the state was taken", "after the device is filled", "in the step that goes on"}


@asynccontextmanager
async def doomed(stage: TrainingStage, store_address: str, point: str) -> AsyncIterator[Trainer]:
    """A trainer in a process of its own that dies at `point`; dead when this ends."""
    ports = stage.root / f"ports {point}"
    environment = {
        "TROUPE_EXPERIENCE_STORE_ADDRESS": store_address,
        "TROUPE_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "TROUPE_DATA_DIR": str(stage.root / "runs"),
        "TROUPE_TRANSFER_DIR": str(stage.root / "transfer"),
        "TROUPE_TRAINER_CLAIM_WAIT_SECONDS": "0.2",
        "TROUPE_PORT_FILE": str(ports),
        "TROUPE_PARENT_PID": str(os.getpid()),
    }
    process = dying.start(point, environment)
    try:
        async with asyncio.timeout(120):
            while not ports.exists():
                assert process.is_alive()
                await asyncio.sleep(0.02)
        async with connect(f"127.0.0.1:{ports.read_text().split()[0]}") as channel:
            yield Trainer(None, channel, stage.job_id)
        await asyncio.to_thread(process.join, 30)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("point", list(dying.SUSPENDING))
async def test_a_death_in_suspension_costs_the_step_a_new_beginning(
    stage: TrainingStage, store_address: str, point: str
) -> None:
    spec = spec_of(stage, deterministic=True)
    async with doomed(stage, store_address, point) as trainer:
        running = await half_a_step(stage, trainer, spec)
        with pytest.raises(TroupeError):
            await trainer.suspend()  # nobody hears where the state is
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
