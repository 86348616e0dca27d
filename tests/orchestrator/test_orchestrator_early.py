"""`pipeline.early_start`: trajectories of the next step begin while the last one is trained."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.orchestrator.test_orchestrator_rosters import finish
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import FakeRollout
from troupe.job import JobSpecError, parse_job
from troupe.v1 import common_pb2 as common_pb

STEPS = 3


def early_yaml(**over: Any) -> str:
    return job_yaml(**{"pipeline__early_start": True, "pipeline__steps": STEPS, **over})


async def training(cluster: Cluster, worker: FakeRollout) -> str:
    """A job that still trains a step when `worker` has begun some of the next one."""
    for trainer in cluster.trainers:
        trainer.script.seconds = 0.3
    job_id = await cluster.submit(early_yaml())
    await cluster.until(job_id, lambda job: bool(worker.ahead))
    return job_id


def of_step(step: int) -> set[str]:
    return {f"q{2 * step + n}-s{step}-t{m}" for n in range(2) for m in range(2)}


@pytest.mark.parametrize("mode", ["sync", "micro_batch"])
async def test_each_query_of_later_steps_runs_on_the_worker_that_began_it(
    cluster: Cluster, mode: str
) -> None:
    other = await cluster.add_rollout()
    job_id = await cluster.submit(early_yaml(pipeline__mode=mode))
    await finish(cluster, job_id, STEPS)
    workers = (cluster.rollouts[0], other)
    begun = [set[str]().union(*worker.ahead) for worker in workers]
    assert begun[0] | begun[1] == of_step(1) | of_step(2)
    for worker, ids in zip(workers, begun, strict=True):
        assert ids <= set(worker.ran), "a query went where it was begun"
    ran = [one for worker in workers for one in worker.ran]
    assert len(ran) == len(set(ran)) == 4 * STEPS


async def test_other_jobs_begin_nothing_early(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml(pipeline__steps=STEPS))
    await finish(cluster, job_id, STEPS)
    assert not cluster.rollouts[0].ahead


async def test_no_more_than_may_run_at_once_begin_early(cluster: Cluster) -> None:
    job_id = await cluster.submit(early_yaml(limits__max_concurrent_trajectories=2))
    await finish(cluster, job_id, STEPS)
    assert [len(ids) for ids in cluster.rollouts[0].ahead] == [2] * (STEPS - 1)


async def test_a_worker_that_dies_with_what_it_began_costs_nothing(cluster: Cluster) -> None:
    """It goes down between the rollout of a step and the next one."""
    other = await cluster.add_rollout()
    job_id = await training(cluster, other)
    await other.down()
    await finish(cluster, job_id, STEPS)
    assert other.ahead


async def test_a_pause_gives_up_what_was_begun(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    job_id = await training(cluster, worker)
    await cluster.pause(job_id)
    await cluster.wait(job_id, [common_pb.JOB_STATE_PAUSED])
    assert not worker.begun_ahead, "nobody keeps it"
    ran = len(worker.ran)
    assert ran == 4
    await cluster.resume(job_id)
    await finish(cluster, job_id, STEPS)


async def test_an_orchestrator_that_dies_leaves_no_second_run(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    job_id = await training(cluster, worker)
    await cluster.stop_orchestrator()
    await asyncio.sleep(0.1)  # how long it is away; any time will do
    await cluster.start_orchestrator()
    await finish(cluster, job_id, STEPS)
    assert len(worker.ran) == len(set(worker.ran)) == 4 * STEPS


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"pipeline__mode": "async"}, "already has trajectories of several steps"),
        ({"pipeline__mode": "serial"}, "one thing after another"),
        ({"pipeline__rollout": "batch"}, "wait for each other"),
    ],
)
def test_where_it_cannot_work_it_is_refused(over: dict[str, Any], why: str) -> None:
    with pytest.raises(JobSpecError, match=r"pipeline\.early_start: .*" + why):
        parse_job(early_yaml(**over))
