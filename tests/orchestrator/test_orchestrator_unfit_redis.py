"""A Redis that may delete keys is refused; a full one is reported to users, and jobs wait for
it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.chassis.app import RunningServer
from services.experience_store.server import StoreSettings
from services.experience_store.server import make_service as make_store
from services.orchestrator.server import make_service as make_orchestrator
from services.orchestrator.settings import OrchestratorSettings
from services.reward.server import RewardService, RewardSettings
from tests.support.cluster import Cluster, job_yaml
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, ResourceExhausted
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")


@pytest.fixture
async def own(
    durable_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """A cluster on a Redis whose settings the test may change."""
    monkeypatch.setattr("services.chassis.redis._WATCH_SECONDS", 0.05)
    cluster = Cluster(durable_redis.url, tmp_path)
    await cluster.open()
    await cluster.add_rollout()
    await cluster.add_trainer()
    yield cluster
    await cluster.close()


def let_evict(durable_redis: RedisServer, policy: str = "allkeys-lru") -> None:
    with durable_redis.client() as plain:
        plain.config_set("maxmemory", "1gb")
        plain.config_set("maxmemory-policy", policy)


def limit(durable_redis: RedisServer, maxmemory: int) -> None:
    with durable_redis.client() as plain:
        plain.config_set("maxmemory", maxmemory)


async def redis_status(cluster: Cluster, name: str = "redis") -> orchestrator_pb.ServiceStatus:
    picture = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
    return next(one for one in picture.services if one.name == name)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (make_orchestrator, OrchestratorSettings),
        (make_store, StoreSettings),
        (RewardService, RewardSettings),
    ],
)
async def test_a_service_does_not_start_on_a_redis_that_may_evict(
    durable_redis: RedisServer, tmp_path: Path, make: Any, settings: Any
) -> None:
    let_evict(durable_redis)
    quotas = {"reward_quotas": {"api": {"rate": 1}}} if make is RewardService else {}
    given = settings(redis_url=durable_redis.url, data_dir=tmp_path, drain_seconds=0, **quotas)
    running: RunningServer[Any] = RunningServer(make, given)
    await running.open()
    with pytest.raises(FailedPrecondition) as caught:
        await asyncio.wait_for(running.become_ready(), PATIENCE)
    assert (caught.value.field, caught.value.value) == ("maxmemory-policy", "allkeys-lru")
    assert "CONFIG SET maxmemory-policy noeviction" in str(caught.value)
    await running.close()


async def test_a_policy_that_changes_is_told_everywhere_and_refuses_new_jobs(
    own: Cluster, durable_redis: RedisServer
) -> None:
    own.rollouts[0].script.seconds = 1000
    job_id = await own.submit(job_yaml())
    await own.wait(job_id, (common_pb.JOB_STATE_RUNNING,))
    assert (await redis_status(own)).serving
    let_evict(durable_redis)
    for refused in (own.submit(job_yaml("other")), own.resume(job_id)):
        with pytest.raises(FailedPrecondition) as caught:
            await refused
        assert caught.value.kind == "redis_evicts"
    status = await redis_status(own)
    assert not status.serving
    assert "maxmemory-policy = allkeys-lru" in status.message
    async with asyncio.timeout(PATIENCE):
        async for event in own.api.WatchJob(orchestrator_pb.WatchJobRequest(job_id=job_id)):
            if "maxmemory-policy = allkeys-lru" in event.notice.text:
                break
    with durable_redis.client() as plain:
        plain.config_set("maxmemory-policy", "noeviction")
    assert (await redis_status(own)).serving
    await own.submit(job_yaml("other"))


async def test_the_orchestrator_reports_an_unfit_redis_of_the_store(
    empty_redis: str,
    durable_redis: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.chassis.redis._WATCH_SECONDS", 0.05)
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.start_store(store_redis_url=durable_redis.url)
    await cluster.start_orchestrator()

    async def told(serving: bool) -> str:
        async with asyncio.timeout(PATIENCE):
            while True:
                status = await redis_status(cluster, "experience_store")
                if status.serving == serving:
                    return status.message
                await asyncio.sleep(0.02)

    assert await told(serving=True) == ""
    let_evict(durable_redis, "volatile-lru")
    assert "maxmemory-policy = volatile-lru" in await told(serving=False)
    assert (await redis_status(cluster)).serving
    with durable_redis.client() as plain:
        plain.config_set("maxmemory-policy", "noeviction")
    assert await told(serving=True) == ""
    limit(durable_redis, 1)
    assert "is full: it uses" in await told(serving=False)
    await cluster.close()


async def test_a_redis_without_an_append_only_file_serves_with_a_warning(
    empty_redis: str, tmp_path: Path
) -> None:
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    status = await redis_status(cluster)
    assert status.serving
    assert "appendonly" in status.message
    await cluster.close()


async def test_a_submission_to_a_full_redis_says_that_it_is_full(
    own: Cluster, durable_redis: RedisServer
) -> None:
    shared = own.orchestrator.service._at  # type: ignore[union-attr]
    shared._redis._patience = 0.1
    limit(durable_redis, 1)
    with pytest.raises(ResourceExhausted) as caught:
        await own.submit(job_yaml())
    assert caught.value.kind == "redis_full"
    assert "Raise maxmemory" in str(caught.value)
    status = await redis_status(own)
    assert not status.serving
    assert "is full: it uses" in status.message
    limit(durable_redis, 0)
    assert (await own.wait(await own.submit(job_yaml()))).state == common_pb.JOB_STATE_SUCCEEDED


async def test_a_job_waits_while_redis_is_full_and_loses_nothing(
    own: Cluster, durable_redis: RedisServer
) -> None:
    service = own.orchestrator.service  # type: ignore[union-attr]
    service._at._redis._patience = 0.1
    own.rollouts[0].script.seconds = 0.1
    # Wherever its calls wait for the store: its own limits must not end the wait.
    job_id = await own.submit(job_yaml(pipeline__steps=4, limits__step_seconds=PATIENCE))
    await own.until(job_id, lambda job: job.step >= 1)
    limit(durable_redis, 1)
    await own.until(job_id, lambda job: "is full: it uses" in job.activity)
    limit(durable_redis, 0)
    job = await own.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await own.check_accounts(job_id, 4, POLICIES)


async def test_an_ended_job_can_be_forgotten_to_make_room(
    own: Cluster, durable_redis: RedisServer
) -> None:
    job_id = await own.submit(job_yaml())
    await own.wait(job_id)
    limit(durable_redis, 1)
    await own.api.ForgetJob(orchestrator_pb.ForgetJobRequest(request_id="forget", job_id=job_id))
    listed = await own.api.ListJobs(orchestrator_pb.ListJobsRequest())
    assert [job.job_id for job in listed.jobs] == []
