"""Workers that die, disks that fill, leases that run out, watchers that leave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_64_intdigest

from services.trainer.state.checkpoint import checkpoint_path
from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE, until
from tests.trainer.stage import Trainer, TrainingStage, fill_up
from troupe.rpc import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    connect,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def test_a_full_disk_fails_the_step_and_not_the_policy(
    stage: TrainingStage, small_disk: Path
) -> None:
    spec = stage.spec()
    trainer = await stage.trainer(data_dir=small_disk)
    await stage.open()
    first = await trainer.bind(spec)
    before = {n: t.clone() for n, t in stage.weights(first).items()}
    await stage.play(stage.first_model(spec))
    ballast = fill_up(small_disk, 40_000)
    with pytest.raises(ResourceExhausted) as caught:
        await trainer.run(0, 0)
    assert (caught.value.kind, caught.value.field) == ("storage_full", "data_dir")
    with pytest.raises(ResourceExhausted, match="no room for a checkpoint"):
        await trainer.checkpoint(0)
    assert not checkpoint_path(small_disk, stage.job_id, "solver", 0).exists()
    binding = trainer.worker.bindings.bound[(stage.job_id, "solver")]
    assert all(torch.equal(before[n], t.cpu()) for n, t in binding.learner.weights().items())
    assert (await trainer.statuses())[0].state == common_pb.BINDING_STATE_IDLE
    # With room again the same step succeeds, and every sample counts once.
    ballast.unlink()
    commit = await trainer.run(0, 0)
    assert (commit.weights.version, commit.num_samples) == (1, 8)
    await trainer.checkpoint(1)


async def test_damaged_weights_are_not_saved_as_a_checkpoint(stage: TrainingStage) -> None:
    """Tensors that are read one at a time are verified while they are written."""
    spec = stage.spec()
    trainer = await stage.trainer()
    await trainer.bind(spec)
    runs = stage.root / "runs"
    (kept,) = (runs / stage.job_id / "state" / "solver").glob("v0-*")
    file = kept / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 0x40]) + whole[-2:])
    with pytest.raises(DataLoss, match="are not what was written") as caught:
        await trainer.checkpoint(0)
    assert caught.value.kind == "state_corrupt"
    path = checkpoint_path(runs, stage.job_id, "solver", 0)
    assert list(path.parent.iterdir()) == []
    file.write_bytes(whole)
    await trainer.checkpoint(0)
    (status,) = await trainer.statuses()
    assert (
        0
        < status.checkpoint_bytes
        == status.checkpoint_written_bytes
        < ((path / "model.safetensors").stat().st_size)
    )


@pytest.mark.slow
async def test_leases_that_ran_out_begin_the_step_again(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stage.spec()
    trainer = await stage.trainer(trainer_lease_seconds=1.0)
    await stage.open()
    await trainer.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.events(0, 0))
    await trainer.trained(4)
    time.sleep(2.5)  # noqa: ASYNC251 - the worker's own event loop is held up, as if suspended
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    commit = (await running)[-1].commit
    assert commit.num_samples == 8
    assert commit.metrics["samples"] == 8


async def test_a_step_that_never_fills_up_ends(stage: TrainingStage) -> None:
    spec = stage.spec(limits={"step_seconds": 0.5})
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.5 s") as caught:
        await trainer.run(0, 0)
    assert caught.value.field == "limits.step_seconds"
    assert (await trainer.statuses())[0].state == common_pb.BINDING_STATE_IDLE


async def test_a_step_without_watchers_is_given_up(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer(trainer_orphan_seconds=0.3)
    await stage.open()
    await trainer.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    watching = asyncio.create_task(trainer.events(0, 0))
    await trainer.trained(4)
    watching.cancel()

    async def idle() -> bool:
        return (await trainer.statuses())[0].state == common_pb.BINDING_STATE_IDLE

    await until(idle)
    # A claim in flight is given back when it is answered.
    request = store_pb.GetStepRequest(job_id=stage.job_id, step=0)

    async def given_back() -> bool:
        return not (await stage.store.GetStep(request)).counts[0].claimed

    await until(given_back)
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    assert (await trainer.run(0, 0)).num_samples == 8


async def test_binding_again_keeps_the_step(stage: TrainingStage) -> None:
    """A restarted orchestrator binds again: no computed gradient is lost."""
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    rollouts = stage.rollouts(stage.first_model(spec))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.events(0, 0))
    await trainer.trained(4)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    stage.transfer.delete(first.key)
    assert await trainer.bind(spec, checksum=first.checksum) == first
    stage.weights(first)  # published again
    again = asyncio.create_task(trainer.events(0, 0))
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    events = await again
    assert events[0].samples == 4
    assert events[-1].commit.num_samples == events[-1].commit.metrics["samples"] == 8


@pytest.mark.parametrize("other", ["specification", "checksum"])
async def test_a_step_ends_when_its_policy_is_bound_anew(stage: TrainingStage, other: str) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    running = asyncio.create_task(trainer.events(0, 0))
    await until(trainer.accumulates)
    if other == "specification":
        await trainer.bind(stage.spec(optimizer={"lr": 1e-3}))
    else:
        with pytest.raises(FailedPrecondition):
            await trainer.bind(spec, checksum="ab" * 16)
        await trainer.bind(spec)
    with pytest.raises(Aborted, match="given up"):
        await running
    await stage.play(stage.first_model(spec))
    assert (await trainer.run(0, 0)).num_samples == 8


async def test_a_step_of_another_version_is_refused_until_the_policy_is_bound(
    stage: TrainingStage,
) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.run(0, 5)
    assert caught.value.kind == "not_bound"


async def test_a_malformed_sample_is_named(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec)):
        data = bytearray(samples[0].response_ids.data)
        data[0] = 200
        samples[0].response_ids.data = bytes(data)
        samples[0].response_ids.checksum = xxh3_64_intdigest(bytes(data))
        await stage.append(query, trajectory, samples)
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.run(0, 0)
    assert caught.value.kind == "malformed_sample"
    assert "outside the policy's vocabulary of 64" in caught.value.message
    assert str(caught.value.value).startswith("q")


class Process:
    """`python -m services.trainer`."""

    def __init__(self, stage: TrainingStage, store_address: str) -> None:
        self._ports = stage.root / "ports"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.trainer"],
            env={
                **os.environ,
                "TROUPE_EXPERIENCE_STORE_ADDRESS": store_address,
                "TROUPE_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
                "TROUPE_DATA_DIR": str(stage.root / "runs"),
                "TROUPE_TRANSFER_DIR": str(stage.root / "transfer"),
                "TROUPE_PORT_FILE": str(self._ports),
                "TROUPE_PARENT_PID": str(os.getpid()),
            },
        )

    async def address(self) -> str:
        port, *_ = await asyncio.to_thread(ports_of, self._process, self._ports)
        return f"127.0.0.1:{port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)


@pytest.mark.slow
async def test_a_killed_worker_is_replaced_and_nothing_counts_twice(
    stage: TrainingStage, store_address: str
) -> None:
    """Killed after its first step, in the middle of its second."""
    spec = stage.spec()
    process = Process(stage, store_address)
    try:
        async with connect(await process.address()) as channel:
            one, two = Trainer(None, channel, stage), await stage.trainer()
            await stage.open()
            await one.bind(spec)
            await stage.play(stage.first_model(spec))
            first = await one.run(0, 0)
            await stage.open(1, version=1)
            rollouts = stage.rollouts(stage.first_model(spec), step=1)
            for query, trajectory, samples in rollouts[:4]:
                await stage.append(query, trajectory, samples, 1)
            running = asyncio.create_task(one.events(1, 1))
            await one.trained(4)
            process.kill()
            await asyncio.gather(running, return_exceptions=True)
            await two.bind(spec, version=1, checksum=first.weights.checksum)
            for query, trajectory, samples in rollouts[4:]:
                await stage.append(query, trajectory, samples, 1)
            commit = await two.run(1, 1)
            assert commit.num_samples == commit.metrics["samples"] == 8
            assert commit.weights.version == 2
    finally:
        process.kill()


async def test_a_worker_that_stops_gives_its_samples_back(stage: TrainingStage) -> None:
    spec = stage.spec()
    trainer = await stage.trainer()
    await stage.open()
    await trainer.bind(spec)
    for query, trajectory, samples in stage.rollouts(stage.first_model(spec))[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.events(0, 0))
    await trainer.trained(4)
    await trainer.server.close()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], Unavailable)
    request = store_pb.GetStepRequest(job_id=stage.job_id, step=0)
    counts = (await stage.store.GetStep(request)).counts[0]
    assert (counts.ready, counts.claimed) == (4, 0)
