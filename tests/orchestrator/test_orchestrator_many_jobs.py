"""Two hundred jobs, one after another: memory and the cost of lists stay constant."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from redis.asyncio import Redis

from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

JOBS = 200
AT_ONCE = 4
# On a busy machine workers count as lost for a while, and are found again.
# Redis holds the record, log, metrics and newest trajectories of an ended job, and of each of its
# two policies the versions and what became of the newest samples.
KEYS_PER_JOB = 40
BYTES_PER_JOB = 64 * 2**10


@pytest.mark.slow
async def test_two_hundred_jobs_are_listed_and_forgotten(cluster: Cluster) -> None:
    worker, trainer = cluster.rollouts[0], cluster.trainers[0]
    async with Redis.from_url(cluster.settings.redis_url) as redis:
        empty_keys = await redis.dbsize()
        early = await play(cluster, 60)
        early_seconds = await seconds_of_a_page(cluster)
        early_used = (await redis.info("memory"))["used_memory"]
        ids = early + await play(cluster, JOBS - 60)
        late_seconds = await seconds_of_a_page(cluster)
        late_used = (await redis.info("memory"))["used_memory"]

        assert late_seconds < 3 * early_seconds + 0.02, "a page costs what is on it"
        assert late_used - early_used < (JOBS - 60) * BYTES_PER_JOB
        assert await redis.dbsize() - empty_keys <= JOBS * KEYS_PER_JOB
        # All but those that were still served when the last ones began.
        # On a busy machine one of the two may have counted as lost when it was to be told.
        assert len({*worker.deleted, *trainer.deleted}) >= JOBS - 2 * AT_ONCE
        assert await all_listed(cluster) == ids[::-1]

        assert cluster.orchestrator is not None
        at = cluster.orchestrator.service._at  # type: ignore[union-attr]
        gc.collect()
        assert not at.jobs._runners
        assert not at.jobs._locks
        assert not at.shared.log._activities
        assert not at.shared.log._waiting
        assert not at.shared.in_flight or not any(at.shared.in_flight.values())

        for job_id in ids:
            await cluster.api.ForgetJob(
                orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
            )
        assert await all_listed(cluster) == []
        left = [key async for key in redis.scan_iter() if any(i.encode() in key for i in ids)]
        assert left == []
        assert await redis.dbsize() <= empty_keys + 5
        assert {*worker.deleted, *trainer.deleted} == set(ids)


async def play(cluster: Cluster, count: int) -> list[str]:
    """Ids of `count` further jobs, in the order of their submission, when all have ended."""
    found: list[str] = []
    for first in range(0, count, AT_ONCE):
        batch = [
            await cluster.submit(job_yaml(f"job-{first + number}", pipeline__steps=1))
            for number in range(min(AT_ONCE, count - first))
        ]
        waits = (cluster.wait(job_id, seconds=PATIENCE) for job_id in batch)
        for job in await asyncio.gather(*waits):
            assert job.state == common_pb.JOB_STATE_SUCCEEDED
        found += batch
    return found


async def seconds_of_a_page(cluster: Cluster) -> float:
    """Return the least CPU seconds of seven readings of the newest 50 jobs."""
    taken = []
    for _ in range(7):
        began = time.process_time()
        reply = await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest(page_size=50))
        taken.append(time.process_time() - began)
        assert len(reply.jobs) == 50
    return min(taken)


async def all_listed(cluster: Cluster) -> list[str]:
    """The ids of all pages."""
    found, token = [], ""
    while True:
        reply = await cluster.api.ListJobs(
            orchestrator_pb.ListJobsRequest(page_size=37, page_token=token)
        )
        found += [job.job_id for job in reply.jobs]
        token = reply.next_page_token
        if not token:
            return found
