"""The orchestrator itself restarts; jobs wait for their requirements."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from redis.asyncio import Redis

from services.orchestrator.state.redis import JobKeys
from tests.support.cluster import Cluster, job_yaml
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")
RUNNING = (common_pb.JOB_STATE_RUNNING,)
# A specification that only an older release took.
RETIRED = yaml.safe_load(job_yaml("veteran", pipeline__steps=7, pipeline__stages=3))


def states_of(events: list[orchestrator_pb.JobEvent]) -> list[int]:
    return [event.state.state for event in events if event.HasField("state")]


@pytest.mark.parametrize("mode", ["sync", "micro_batch", "async"])
async def test_a_restarted_orchestrator_continues(cluster: Cluster, mode: str) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    cluster.trainers[0].script.seconds = 0.05
    text = job_yaml(pipeline__steps=3, pipeline__mode=mode, evaluation__queries=2)
    job_id = await cluster.submit(text)
    await cluster.wait(job_id, RUNNING)
    for pause in (0.15, 0.25, 0.2):
        await asyncio.sleep(pause)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 3, POLICIES)
    states = states_of(await cluster.events(job_id))
    again = [common_pb.JOB_STATE_RUNNING, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING]
    assert any(states[n : n + 3] == again for n in range(len(states)))
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    assert [row.step for row in rows] == [0, 1, 2, 3, 3]
    lines = (cluster.directory / job_id / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5
    # Trajectories that ended before a restart count in their step's metrics, or are reported as
    # unknown.
    for row in rows[1:4]:
        unseen = row.values.get("trajectories/unseen", 0)
        assert row.values["trajectories/completed"] + unseen == 4
    assert job.started_at.ToSeconds() - job.created_at.ToSeconds() <= 1


async def test_a_cancel_survives_a_restart(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id, RUNNING)
    service = cluster.orchestrator.service  # type: ignore[union-attr]
    jobs = service._at.jobs  # type: ignore[union-attr]
    await jobs.stop()  # the process dies just after it has stored the cancellation
    assert (await cluster.cancel(job_id)).state == common_pb.JOB_STATE_CANCELLING
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_CANCELLED


async def test_the_loser_stops_before_its_step_does(cluster: Cluster) -> None:
    """An orchestrator that was cut off does not continue a step for hours."""
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    await cluster.until(job_id, lambda job: "trajectories" in job.activity)
    jobs = cluster.orchestrator.service._at.jobs  # type: ignore[union-attr]
    redis = Redis.from_url(cluster.settings.redis_url)
    record = JobKeys(job_id).record
    await redis.hset(record, mapping={"epoch": 99, "owner": "elsewhere, process 1"})
    await cluster.until(job_id, lambda job: not jobs._runners)
    page = await cluster.orchestrator.service._at.shared.log.page(job_id, "")  # type: ignore[union-attr]
    texts = [event.notice.text for event in page]
    assert any("orchestrator (elsewhere, process 1) has taken" in text for text in texts)
    assert (await redis.hget(record, "state")) == str(int(common_pb.JOB_STATE_RUNNING)).encode()
    await redis.aclose()


async def test_two_orchestrators_one_wins(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(job_yaml(pipeline__steps=3))
    await cluster.wait(job_id, RUNNING)
    old = cluster.orchestrator
    assert old is not None
    # The newcomer takes the address over, as a restarted container would.
    old._server, server = None, old._server
    assert server is not None
    await server.stop(0)
    await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 3, POLICIES)
    assert old.service._at.jobs._runners == {}  # type: ignore[union-attr]
    stops = [text for text in await cluster.notices(job_id) if " stops: " in text]
    assert len(stops) == 1
    assert f"process {os.getpid()}) has taken job {job_id} over, with epoch 2" in stops[0]
    await old.service.stop(0)  # type: ignore[union-attr]


@pytest.fixture
async def bare(empty_redis: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster without workers."""
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    yield cluster
    await cluster.close()


async def test_a_job_waits_for_workers_and_says_so(bare: Cluster) -> None:
    job_id = await bare.submit(job_yaml())
    await bare.wait(job_id, (common_pb.JOB_STATE_STARTING,))
    both = "waiting for a trainer and a rollout worker"
    await bare.until(job_id, lambda job: job.activity == both)
    await bare.add_trainer()
    await bare.until(job_id, lambda job: job.activity == "waiting for a rollout worker")
    await bare.add_rollout()
    assert (await bare.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


async def test_a_job_without_workers_fails_in_the_end(bare: Cluster) -> None:
    await bare.stop_orchestrator()
    bare.settings = bare.settings.model_copy(update={"workers_timeout_seconds": 0.2})
    await bare.start_orchestrator()
    job = await bare.wait(await bare.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "deadline_exceeded"
    assert "waiting for a trainer and a rollout worker" in job.problem.message
    assert job.problem.field == "TROUPE_WORKERS_TIMEOUT_SECONDS"


async def test_a_job_that_was_up_waits_for_its_workers_as_for_a_step(bare: Cluster) -> None:
    """However short the deadline at its start: they may all be restarting."""
    rollout, trainer = await bare.add_rollout(), await bare.add_trainer()
    rollout.script.seconds = 1000
    job_id = await bare.submit(job_yaml())
    await bare.until(job_id, lambda job: "trajectories" in job.activity)
    await bare.stop_orchestrator()
    await rollout.down()
    await trainer.down()
    bare.rollouts.clear()
    bare.trainers.clear()
    bare.settings = bare.settings.model_copy(
        update={"workers_timeout_seconds": 0.1, "bind_timeout_seconds": 0.1}
    )
    await bare.start_orchestrator()
    await bare.until(job_id, lambda job: job.activity.startswith("waiting for a trainer and"))
    await asyncio.sleep(0.5)  # longer than both deadlines; the job waits however long this takes
    await bare.add_rollout()
    await bare.add_trainer()
    job = await bare.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem


@pytest.mark.parametrize("mode", ["sync", "micro_batch", "async"])
async def test_the_store_may_be_away_in_the_middle_of_a_step(cluster: Cluster, mode: str) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    text = job_yaml(pipeline__mode=mode, pipeline__steps=4, pipeline__over_sampling=1)
    job_id = await cluster.submit(text)
    await cluster.until(job_id, lambda job: "trajectories" in job.activity)
    for _ in range(2):
        # How long it is away and back; any times will do.
        await cluster.stop_store()
        await asyncio.sleep(1.0)
        await cluster.start_store()
        await asyncio.sleep(0.3)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 4, POLICIES)


async def test_jobs_survive_a_restart_of_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, durable=True)
    server.start()
    cluster = Cluster(server.url, tmp_path)
    try:
        await cluster.open()
        rollout = await cluster.add_rollout()
        await cluster.add_trainer()
        rollout.script.seconds = 0.05
        job_id = await cluster.submit(job_yaml(pipeline__steps=4))
        await cluster.until(job_id, lambda job: job.step > 0)
        server.kill()
        await asyncio.sleep(0.2)  # how long it is away; any time will do
        server.start()
        job = await cluster.wait(job_id)
        assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
        await cluster.check_accounts(job_id, 4, POLICIES)
    finally:
        await cluster.close()
        server.stop()


async def test_a_step_counts_what_ended_before_a_restart(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    worker.script.slow = lambda ticket: 1000 if ticket.trajectory_id.endswith("t1") else 0.0
    job_id = await cluster.submit(job_yaml(pipeline__steps=1))
    await cluster.until(job_id, lambda job: "2 of 4 trajectories" in job.activity)

    async def kept() -> bool:
        request = orchestrator_pb.ListTrajectoriesRequest(job_id=job_id)
        return len((await cluster.api.ListTrajectories(request)).trajectories) == 2

    await until(kept)
    await cluster.stop_orchestrator()
    worker.script.slow = lambda ticket: 0.0
    await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.metrics["trajectories/completed"] == 4
    assert job.metrics["reward/mean"] == 1.0
    assert "trajectories/unseen" not in job.metrics
    assert sorted(worker.ran) == sorted([f"q{q}-s0-t{t}" for q in (0, 1) for t in (0, 1, 1)])


async def test_a_job_of_an_older_release_is_shown_and_fails_by_itself(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    old = [await cluster.submit(job_yaml()) for _ in range(2)]
    await cluster.wait(old[0], (common_pb.JOB_STATE_RUNNING,))
    await cluster.stop_orchestrator()
    redis = Redis.from_url(cluster.settings.redis_url)
    for job_id in old:
        await redis.hset(JobKeys(job_id).record, "spec_json", json.dumps(RETIRED))
    cancelling = str(int(common_pb.JOB_STATE_CANCELLING))
    await redis.hset(JobKeys(old[1]).record, "state", cancelling)
    await redis.aclose()

    await cluster.start_orchestrator()
    job = await cluster.wait(old[0])
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("spec_outdated", "pipeline.stages")
    assert (job.name, job.total_steps) == ("veteran", 7)
    assert (await cluster.wait(old[1])).state == common_pb.JOB_STATE_CANCELLED
    listed = await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())
    assert set(old) <= {one.job_id for one in listed.jobs}
