"""A gang over two trainer workers that share no disk: one leads, the other lends its devices."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang.lending import LentDevices
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import StateStore
from tests.support.waiting import PATIENCE, until
from tests.trainer.gang.test_gang_steps import (
    assert_close,
    copied,
    gone,
    ranks,
    specs,
    step,
    violations,
)
from tests.trainer.stage import Trainer, TrainingStage
from troupe.rpc import Aborted, FailedPrecondition, InvalidArgument
from troupe.v1 import trainer_pb2 as trainer_pb


def hosts(*members: Trainer, formed: int = 1) -> trainer_pb.GangHosts:
    return trainer_pb.GangHosts(
        members=[member.server.address for member in members], formed=formed
    )


async def pair(stage: TrainingStage) -> tuple[Trainer, Trainer]:
    """Start two workers of one device each, with separate data directories."""
    more: dict[str, Any] = {"gang_ranks": 1, "gang_timeout_seconds": PATIENCE}
    return (
        await stage.trainer(worker_id="leader", data_dir=stage.root / "a", **more),
        await stage.trainer(worker_id="member", data_dir=stage.root / "b", **more),
    )


async def free(trainer: Trainer) -> None:
    """Wait until a worker has its devices back."""
    await until(lambda: trainer.worker.lent.request is None)


def states_of(directory: Path, job_id: str) -> list[str]:
    folder = directory / job_id / "state/solver"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.slow
async def test_a_gang_over_two_workers_learns_what_one_device_does(stage: TrainingStage) -> None:
    two, one = specs(stage)
    job, alone = await stage.sibling()
    await alone.bind_again(one)
    expected = [await step(job, alone, number, one) for number in range(4)]
    leader, member = await pair(stage)
    await leader.bind_again(two, hosts=hosts(member))
    assert len(ranks(os.getpid())) == 2
    beat = member.worker.heartbeat()
    assert (beat.trainer.ranks, beat.trainer.lends_to) == (1, "leader")
    assert "solver" in beat.doing
    found = [await step(stage, leader, 0, two)]
    # The leader's host has the whole state, the other host nothing.
    (path,) = (stage.root / "a" / stage.job_id / "state/solver").glob("v1-*")
    assert sorted(one.name for one in path.iterdir()) == [
        "random.safetensors",
        "state.json",
        "whole.safetensors",
    ]
    assert states_of(stage.root / "b", stage.job_id) == []

    # A rank of the other host dies in the middle of a step, none of which was counted.
    (remote,) = [one for one in ranks(os.getpid()) if one.environ()["RANK"] == "1"]
    await stage.open(1, version=1)
    await stage.play(stage.first_model(two), step=1, version=1)
    remote.send_signal(signal.SIGKILL)
    with pytest.raises(Aborted) as lost:
        await leader.run(1, 1)
    assert lost.value.kind == "gang_lost"
    # The leader has formed the gang again, on the same hosts, from its own disk.
    weights = (await leader.run(1, 1)).weights
    found.append((weights, copied(stage, weights)))

    # When it is suspended, it leaves the other worker; then it continues with that one as leader.
    state = await leader.suspend()
    await free(member)
    assert ranks(os.getpid()) == []
    request = trainer_pb.ResumeRequest(
        request_id="resume",
        job_id=stage.job_id,
        policy="solver",
        spec_json=two.model_dump_json(),
        version=2,
        checksum=weights.checksum,
        state=state,
        hosts=hosts(leader, formed=2),
    )
    copied_states = StateStore(stage.root / "b", stage.job_id, "solver")
    for version in (0, 2):  # as its replicas are: the first version is the reference
        source = StateStore(stage.root / "a", stage.job_id, "solver").find(version)
        assert source is not None
        files = {one.name: memoryview(one.read_bytes()) for one in source.iterdir()}
        copied_states.take_in(source.name, files)
    await member.stub.Resume(request, timeout=PATIENCE)
    assert leader.worker.lent.request is not None
    found.append(await step(stage, member, 2, two))
    await member.release()
    await free(leader)

    # One device continues from the gang's state.
    weights = found[-1][0]
    await member.bind_again(one, version=3, checksum=weights.checksum)
    found.append(await step(stage, member, 3, one))
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert_close(mine, theirs)
    assert await violations(stage) == []


@pytest.mark.slow
async def test_a_lost_leader_s_ranks_end_and_the_newest_gang_gets_the_devices(
    stage: TrainingStage,
) -> None:
    two, one = specs(stage)
    leader, member = await pair(stage)
    await leader.bind(two, hosts=hosts(member, formed=5))
    before = ranks(os.getpid())
    # The policy's gang was formed again and is led by the member: its earlier ranks end.
    await member.bind(two, hosts=hosts(leader, formed=6))
    await gone(before)
    assert leader.worker.lent.request.leader == "member"
    assert leader.worker.bindings.bound == {}
    before = ranks(os.getpid())
    assert len(before) == 2
    third = await stage.trainer(
        worker_id="third", data_dir=stage.root / "c", gang_ranks=1, gang_timeout_seconds=PATIENCE
    )
    await third.bind(two, hosts=hosts(member, formed=7))
    await gone(before)
    assert member.worker.lent.request.leader == "third"
    # An older gang does not get the devices back, and does not wait for long.
    began = time.monotonic()
    with pytest.raises(Aborted) as lost:
        await leader.bind(two, hosts=hosts(member, formed=5))
    assert lost.value.kind == "gang_lost"
    assert "third" in lost.value.message
    assert time.monotonic() - began < PATIENCE
    # A lost member is noticed at once, and not waited for.
    await member.server.close()
    began = time.monotonic()
    await stage.open()
    with pytest.raises(Aborted) as lost:
        await third.run(0, 0)
    assert lost.value.kind == "gang_lost"
    assert time.monotonic() - began < PATIENCE
    await third.release()
    with pytest.raises(FailedPrecondition) as uneven:
        await third.bind(two, hosts=trainer_pb.GangHosts(members=["a:1", "b:2"]))
    assert uneven.value.kind == "gang_uneven"
    await third.bind(one)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("endpoint", "nowhere"), ("ranks", 3), ("ranks", 0), ("node", 0), ("node", 2)),
        *(("start_seconds", 0.0), ("start_seconds", math.nan), ("timeout_seconds", 1e308)),
    ],
)
async def test_ranks_that_do_not_form_a_gang_are_refused(field: str, value: object) -> None:
    request = trainer_pb.HostRanksRequest(
        endpoint="127.0.0.1:1", ranks=2, nodes=2, node=1, leader="l", job_id="j", policy="p"
    )
    request.start_seconds = request.timeout_seconds = 60.0
    setattr(request, field, value)
    lent = LentDevices(TrainerSettings(), 2)
    with pytest.raises(InvalidArgument) as refused:
        await anext(lent.host(request))
    assert refused.value.field == field
    assert lent.request is None
