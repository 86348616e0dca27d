"""Gangs over several trainer workers: leaders, lenders, and the loss of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import FakeTrainer, TrainerScript
from tests.support.waiting import until
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

SUCCEEDED = common_pb.JOB_STATE_SUCCEEDED


@asynccontextmanager
async def opened(redis_url: str, directory: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """A started cluster with a rollout worker and no trainer."""
    cluster = Cluster(redis_url, directory)
    cluster.settings = cluster.settings.model_copy(update=settings)
    await cluster.open()
    try:
        await cluster.add_rollout()
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
async def house(empty_redis: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with opened(empty_redis, tmp_path, gang_wait_seconds=0.5) as cluster:
        yield cluster


def job(gang: int, **over: object) -> str:
    return job_yaml(policies=("alice",), **{"policies.alice.trainer.gang": gang}, **over)


async def audited(cluster: Cluster, job_id: str) -> None:
    audit = await cluster.store.AuditTables(store_pb.AuditTablesRequest(job_id=job_id))
    assert list(audit.violations) == []
    assert {one.trained for one in audit.policies} == {8}


async def leader_of(trainers: list[FakeTrainer]) -> FakeTrainer:
    """The worker on which the policy trains."""
    found: list[FakeTrainer] = []
    await until(lambda: found.extend(one for one in trainers if "alice" in one.computing) or found)
    (leader,) = found
    return leader


async def test_a_member_that_is_lost_is_replaced_and_its_gang_is_led_on(house: Cluster) -> None:
    script = TrainerScript(ranks=1, seconds=1.0)
    trainers = [await house.add_trainer(script) for _ in range(2)]
    job_id = await house.submit(job(2))
    leader = await leader_of(trainers)
    (member,) = [one for one in trainers if one is not leader]
    (bind,) = leader.binds
    assert list(bind.hosts.members) == [member.settings.address]
    assert bind.hosts.formed
    assert not member.binds

    await member.down()
    # One device cannot hold a gang of two: the job waits, although it would be refused as a new
    # one.
    waiting = await house.until(job_id, lambda one: "waits for devices" in one.activity)
    assert "its gang has 2" in waiting.activity
    assert leader.calls["Release"] == 1
    await asyncio.sleep(1.0)  # several rounds of the scheduler; more of them change nothing
    assert (await house.job(job_id)).state == common_pb.JOB_STATE_RUNNING
    third = await house.add_trainer(script)
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    binds = [*leader.binds[1:], *third.binds]
    assert {address for one in binds for address in one.hosts.members} <= {
        leader.settings.address,
        third.settings.address,
    }
    assert all(one.hosts.formed > bind.hosts.formed for one in binds)
    await audited(house, job_id)


async def test_a_leader_that_is_lost_is_replaced(house: Cluster) -> None:
    script = TrainerScript(ranks=2, seconds=0.5)
    trainers = [await house.add_trainer(script) for _ in range(3)]
    job_id = await house.submit(job(4))
    leader = await leader_of(trainers)
    await leader.down()
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    late = [one for trainer in trainers if trainer is not leader for one in trainer.binds]
    left = {one.settings.address for one in trainers if one is not leader}
    assert late
    assert all(set(one.hosts.members) < left for one in late)
    await audited(house, job_id)


async def test_a_gang_larger_than_all_trainers_together_is_refused(house: Cluster) -> None:
    for _ in range(3):
        await house.add_trainer(TrainerScript(ranks=2))
    ended = await house.wait(await house.submit(job(8)))
    assert ended.state == common_pb.JOB_STATE_FAILED
    assert ended.problem.kind == "gang_too_large"
    assert ended.problem.field == "policies.alice.trainer.gang"
    assert ended.problem.value == "8"
    assert "has 6" in ended.problem.message
    assert ended.problem.remedy
    assert not any(one.binds for one in house.trainers)


async def test_an_orchestrator_that_starts_again_leaves_a_gang_where_it_is(
    empty_redis: str, tmp_path: Path
) -> None:
    # A busy machine is late with heartbeats: no worker may count as lost here.
    async with opened(empty_redis, tmp_path, lost_after_beats=1000) as house:
        script = TrainerScript(ranks=1, seconds=1.0)
        trainers = [await house.add_trainer(script) for _ in range(3)]
        job_id = await house.submit(job(2))
        leader = await leader_of(trainers)
        others = [one for one in trainers if one is not leader]
        await house.stop_orchestrator()
        # Only the leader's heartbeat reports the gang. If the others' came first, they would be
        # made a gang.
        for one in others:
            await one.fall_silent()
        await house.start_orchestrator()
        workers = house.orchestrator.service._at.shared.workers  # type: ignore[union-attr]
        await until(lambda: workers.usable(orchestrator_pb.WORKER_KIND_TRAINER))
        for one in others:
            await one.speak()
        ended = await house.wait(job_id)
        assert ended.state == SUCCEEDED, ended.problem
        assert [one for one in trainers if one.binds] == [leader]
        await audited(house, job_id)
