"""A step of many trajectories is planned without holding up anybody else."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe.rpc import InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


async def longest_hold(seconds: float) -> float:
    """CPU seconds for which the event loop was held at most, before it came to a waiting task.

    CPU time, because other processes may take the processor meanwhile.
    """
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.thread_time()
        await asyncio.sleep(0.01)
        longest = max(longest, time.thread_time() - began)
    return longest


async def test_a_step_of_the_largest_size_does_not_block(cluster: Cluster) -> None:
    small = job_yaml("small", pipeline__steps=1)
    await cluster.wait(await cluster.submit(small))
    cluster.rollouts[0].script.seconds = 1000
    text = job_yaml("large", pipeline__queries_per_step=32_768, pipeline__group_size=8)
    gc.collect()
    gc.freeze()  # else a collection of what earlier tests left holds the loop for seconds
    job_id = await cluster.submit(text)
    held = 0.0
    for _ in range(int(PATIENCE)):
        held = max(held, await longest_hold(1))
        if len(cluster.rollouts[0].ran) >= 1024 + 4:
            break
    assert len(cluster.rollouts[0].ran) >= 1024, "it began"
    assert held < 1.5, "planned in one piece it is 5 s and more"
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_absurd_sizes_of_steps_are_refused_and_nothing_is_stored(cluster: Cluster) -> None:
    for field, value in (
        ("pipeline__steps", 1 << 63),
        ("pipeline__queries_per_step", 10**9),
        ("pipeline__over_sampling", 10**9),
        ("evaluation__queries", 10**9),
    ):
        with pytest.raises(InvalidArgument, match="less than or equal") as caught:
            await cluster.submit(job_yaml(**{field: value}))
        assert caught.value.field == field.replace("__", ".")
    assert not (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
