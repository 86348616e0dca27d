"""Steps of a gang through store and service: the results of one device, and ranks that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.processes import ports_of
from tests.support.training import tiny_config
from tests.support.waiting import PATIENCE
from tests.trainer.gang.test_gang import gang_spec
from tests.trainer.stage import Trainer, TrainingStage, fill_up
from troupe.job import JobSpec
from troupe.rpc import Aborted, FailedPrecondition, ResourceExhausted, connect
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]

# torchrun's own command line ends like its ranks' command lines.
_AGENT, _RANK = "services.trainer.gang.gang", "services.trainer.gang.rank"


def gang_of(pid: int) -> list[psutil.Process]:
    """Return torchrun and its ranks under `pid`."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if _command(process)[-1:] == [_RANK]]


def ranks(pid: int) -> list[psutil.Process]:
    return [process for process in gang_of(pid) if _AGENT not in _command(process)]


def _command(process: psutil.Process) -> list[str]:
    """Return the command line; empty for a process that has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(PATIENCE):
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def specs(stage: TrainingStage) -> tuple[JobSpec, JobSpec]:
    """Return the same job for a gang of two and for one device."""
    algorithm = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01}
    # A step far larger than the effect of rounding on Adam.
    optimizer = {"lr": 1e-3, "eps": 1e-3}
    two, one = (
        gang_spec(stage.tokenizer, size, algorithm=algorithm, optimizer=optimizer)
        for size in (2, 1)
    )
    return two, one


async def step(
    job: TrainingStage, trainer: Trainer, number: int, spec: JobSpec
) -> tuple[common_pb.WeightsRef, Tensors]:
    """Make a step; return the version and its weights."""
    await job.open(number, version=number)
    await job.play(job.first_model(spec), step=number, version=number)
    weights = (await trainer.run(number, number)).weights
    return weights, copied(job, weights)


def copied(job: TrainingStage, weights: common_pb.WeightsRef) -> Tensors:
    """Copy the weights, which are pruned some versions later."""
    return {name: t.clone() for name, t in job.weights(weights).items()}


def assert_close(mine: Tensors, theirs: Tensors) -> None:
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


async def violations(job: TrainingStage) -> list[str]:
    audit = await job.store.AuditTables(store_pb.AuditTablesRequest(job_id=job.job_id))
    (policy,) = audit.policies
    assert (policy.lost, policy.duplicated) == (0, 0)
    return list(audit.violations)


async def test_a_gang_and_one_device_take_turns(stage: TrainingStage) -> None:
    """Steps 0 and 1 by a gang, 2 by one device, 3 by a gang, with the results of one device."""
    two, one = specs(stage)
    job, alone = await stage.sibling()
    await alone.bind(one)
    expected = [await step(job, alone, number, one) for number in range(4)]
    trainer = await stage.trainer(gang_ranks=2)
    await trainer.bind(two)
    found = [await step(stage, trainer, number, two) for number in range(2)]
    assert len(ranks(os.getpid())) == 2
    await trainer.release()
    states = stage.root / "runs" / stage.job_id / "state/solver"
    for size, spec in ((1, one), (2, two)):
        version, checksum = len(found), found[-1][0].checksum
        assert (await trainer.bind(spec, version=version, checksum=checksum)).checksum == checksum
        found.append(await step(stage, trainer, version, spec))
        (newest,) = states.glob(f"v{version + 1}-*")
        assert (newest / "weights.safetensors").exists() == (size == 1)
        await trainer.release()
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert_close(mine, theirs)
    assert await violations(stage) == []


async def test_a_step_begins_again_when_a_rank_dies(stage: TrainingStage) -> None:
    two, one = specs(stage)
    job, alone = await stage.sibling()
    await alone.bind(one)
    expected = [await step(job, alone, number, one) for number in range(2)]
    trainer = await stage.trainer(gang_ranks=2)
    await trainer.bind(two)
    before = gang_of(os.getpid())
    await stage.open(0)
    rollouts = stage.rollouts(stage.first_model(two))
    for query, trajectory, samples in rollouts[:4]:
        await stage.append(query, trajectory, samples)
    running = asyncio.create_task(trainer.run(0, 0))
    await trainer.trained(4)  # half of the step is in the gradients
    for query, trajectory, samples in rollouts[4:]:
        await stage.append(query, trajectory, samples)
    victim = ranks(os.getpid())[1]
    victim.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(Aborted) as lost:
        await running
    assert lost.value.kind == "gang_lost"
    assert time.monotonic() - began < 110  # not after the ranks' own timeout of 120 s
    await gone(before)
    commit = await trainer.run(0, 0)
    assert (commit.num_samples, commit.metrics["samples"]) == (8, 8)
    assert_close(copied(stage, commit.weights), expected[0][1])
    _, second = await step(stage, trainer, 1, two)
    assert_close(second, expected[1][1])
    assert await violations(stage) == []


async def test_a_step_moves_from_a_gang_to_one_device_and_back(stage: TrainingStage) -> None:
    """Suspended twice in the middle of one step, each time resumed by another number of ranks."""
    # A step far larger than the effect of rounding on Adam.
    optimizer = {"lr": 1e-3, "eps": 1e-3}
    two, one = (gang_spec(stage.tokenizer, size, optimizer=optimizer) for size in (2, 1))
    queries = ("q0", "q1", "q2")
    model = stage.first_model(two)
    job, alone = await stage.sibling()
    await alone.bind(one)
    await job.open(queries=queries)
    for query in queries:
        await job.play(model, queries=[query])
    expected = copied(job, (await alone.run(0, 0)).weights)
    gang, single = await stage.trainer(gang_ranks=2), await stage.trainer(worker_id="single")
    await gang.bind(two)
    await stage.open(queries=queries)
    moves = ((gang, single, one), (single, gang, two))
    for number, (here, there, spec) in enumerate(moves, 1):
        await stage.play(model, queries=[queries[number - 1]])
        running = asyncio.create_task(here.run(0, 0))
        await here.trained(4 * number)
        state = await here.suspend()
        with pytest.raises(Aborted) as stopped:
            await running
        assert stopped.value.kind == "step_suspended"
        assert (state.samples, state.step) == (4 * number, 0)
        await there.resume(spec, state)
    await stage.play(model, queries=queries[2:])
    commit = await gang.run(0, 0)
    assert (commit.num_samples, commit.metrics["samples"]) == (12, 12)
    assert_close(copied(stage, commit.weights), expected)
    _, second = await step(stage, gang, 1, two)
    assert_close(second, (await step(job, alone, 1, one))[1])
    assert await violations(stage) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_rank_outlives_its_lead(
    stage: TrainingStage, store_address: str, number: signal.Signals
) -> None:
    ports = stage.root / "ports"
    environment = {
        **os.environ,
        "TROUPE_EXPERIENCE_STORE_ADDRESS": store_address,
        "TROUPE_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "TROUPE_DATA_DIR": str(stage.root / "runs"),
        "TROUPE_TRANSFER_DIR": str(stage.root / "transfer"),
        "TROUPE_PORT_FILE": str(ports),
        "TROUPE_GANG_RANKS": "2",
    }
    command = [sys.executable, "-m", "services.trainer"]
    lead = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    try:
        port, *_ = await asyncio.to_thread(ports_of, lead, ports)
        async with connect(f"127.0.0.1:{port}") as channel:
            trainer = Trainer(None, channel, stage)
            await trainer.bind(specs(stage)[0])
        children = gang_of(lead.pid)
        assert len(ranks(lead.pid)) == 2
        lead.send_signal(number)
        await asyncio.to_thread(lead.wait, PATIENCE)
        assert lead.returncode == (0 if number == signal.SIGTERM else -number)
        await gone(children)
    finally:
        lead.kill()


async def test_a_gang_larger_than_the_worker_is_refused(stage: TrainingStage) -> None:
    trainer = await stage.trainer(gang_ranks=2)
    with pytest.raises(FailedPrecondition) as refused:
        await trainer.bind(gang_spec(stage.tokenizer, 3))
    assert refused.value.kind == "gang_too_large"
    assert await trainer.statuses() == []


async def test_a_policy_that_is_too_large_for_the_devices_of_its_gang_is_refused(
    stage: TrainingStage,
) -> None:
    model = {
        "config": tiny_config(num_hidden_layers=8, max_position_embeddings=64),
        "tokenizer": str(stage.tokenizer),
    }
    specs = [gang_spec(stage.tokenizer, size, model=model) for size in (1, 2)]
    # Short passes, so that the divided part is the larger one.
    devices = partial(stage.trainer, gang_ranks=2, trainer_forward_tokens=16)
    needed = []
    for spec in specs:
        trainer = await devices(trainer_memory_bytes=1000)
        with pytest.raises(FailedPrecondition) as refused:
            await trainer.bind(spec)
        assert refused.value.kind == "policy_too_large"
        assert refused.value.field == "policies.solver.model"
        needed.append(int(refused.value.value or 0))
    # Devices with room for one of two ranks, but not for the whole policy.
    assert needed[1] < needed[0]
    trainer = await devices(trainer_memory_bytes=needed[1])
    with pytest.raises(FailedPrecondition):
        await trainer.bind(specs[0])
    await trainer.bind(specs[1])


async def test_a_checkpoint_of_a_gangs_policy_loads_as_a_model(stage: TrainingStage) -> None:
    from transformers import AutoModelForCausalLM

    two, _ = specs(stage)
    trainer = await stage.trainer(gang_ranks=2)
    await trainer.bind(two)
    _, weights = await step(stage, trainer, 0, two)
    path = await trainer.checkpoint(1)
    named = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert set(named) == set(weights)
    assert all(torch.equal(named[name].data, tensor) for name, tensor in weights.items())


async def test_a_full_disk_fails_the_step_and_not_the_gang(
    stage: TrainingStage, small_disk: Path
) -> None:
    two, _ = specs(stage)
    trainer = await stage.trainer(data_dir=small_disk)
    await stage.open()
    await trainer.bind(two)
    await stage.play(stage.first_model(two))
    for leave in (8192, 65_536, 200_000):  # files written first, in the middle, last
        ballast = fill_up(small_disk, leave)
        with pytest.raises(ResourceExhausted) as caught:
            await trainer.run(0, 0)
        assert (caught.value.kind, caught.value.field) == ("storage_full", "data_dir")
        ballast.unlink()
        states = small_disk / stage.job_id / "state/solver"
        assert [name[:3] for name in os.listdir(states)] == ["v0-"]
    commit = await trainer.run(0, 0)
    assert (commit.weights.version, commit.num_samples) == (1, 8)
