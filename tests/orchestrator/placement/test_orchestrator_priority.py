"""Several jobs on one cluster: the queue of jobs, and who has the trainer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.orchestrator.jobs.queue import JobQueue
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import TrainerScript
from tests.support.waiting import until
from troupe.job import JobSpecError, parse_job
from troupe.rpc import FailedPrecondition
from troupe.scheduling import binding
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

SUCCEEDED = common_pb.JOB_STATE_SUCCEEDED


@pytest.fixture
async def house(empty_redis: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A started cluster that runs one job at a time."""
    cluster = Cluster(empty_redis, tmp_path)
    cluster.settings = cluster.settings.model_copy(update={"max_running_jobs": 1})
    await cluster.open()
    await cluster.add_rollout()
    await cluster.add_trainer()
    yield cluster
    await cluster.close()


def one(name: str, priority: int = 0, **over: object) -> str:
    quick = {f"policies.{name}.trainer.quantum_seconds": 0.05}
    return job_yaml(name, policies=(name,), priority=priority, **quick, **over)


async def running(cluster: Cluster) -> str:
    """Submit a job that runs until it is cancelled."""
    job_id = await cluster.submit(one("first", pipeline__steps=100_000))
    await cluster.until(job_id, lambda job: job.step > 0)
    return job_id


async def test_jobs_that_colocate_wait_in_line_too(house: Cluster) -> None:
    """They are never on the devices together, so neither is refused."""
    house.rollouts[0].script.devices = [
        orchestrator_pb.GivenDevice(index=0, device_class="H100", memory_bytes=80 << 30)
    ]

    async def is_reported() -> bool:
        picture = await house.api.GetCluster(orchestrator_pb.GetClusterRequest())
        return any(one.devices for one in picture.workers)

    await until(is_reported)
    turns = {"pipeline.mode": "sync", "pipeline.colocate": True}
    first = await house.submit(one("first", pipeline__steps=100_000, **turns))
    await house.until(first, lambda job: job.step > 0)
    second, third = await house.submit(one("second", **turns)), await house.submit(one("third"))
    await house.until(third, lambda job: "at place 2" in job.activity)
    await house.cancel(first)
    for job_id in (second, third):
        assert (await house.wait(job_id)).state == SUCCEEDED


async def test_jobs_wait_in_line_by_priority(house: Cluster) -> None:
    first = await running(house)
    low, high, same = [
        await house.submit(one(name, priority))
        for name, priority in (("low", -1), ("high", 3), ("same", -1))
    ]
    await house.until(high, lambda job: "at place 1, priority 3" in job.activity)
    await house.until(low, lambda job: "at place 2, priority -1" in job.activity)
    await house.until(same, lambda job: "at place 3" in job.activity)
    assert (await house.job(high)).state == common_pb.JOB_STATE_SUBMITTED
    await house.cancel(first)
    ends = [await house.wait(job_id) for job_id in (first, high, low, same)]
    assert [job.state for job in ends] == [common_pb.JOB_STATE_CANCELLED] + 3 * [SUCCEEDED]
    # Each began after the one before it had ended.
    for before, after in itertools.pairwise(ends):
        assert before.ended_at.ToNanoseconds() <= after.started_at.ToNanoseconds()


async def hold_device(cluster: Cluster, job_id: str) -> None:
    """Have the only device of the rollout worker reported as held by a job's engine."""
    device = orchestrator_pb.GivenDevice(
        index=0, device_class="H100", holders=[f"{job_id}.first.0@r"]
    )
    [worker] = cluster.rollouts
    worker.script.devices = [device]

    async def is_reported() -> bool:
        picture = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
        return any(device in one.devices for one in picture.workers)

    await until(is_reported)


def served(name: str, **over: object) -> str:
    engine = {f"policies.{name}.engine": {"kind": "sglang", "replicas": 1}}
    return one(name, **engine, **over)


async def test_a_job_waits_for_the_devices_of_the_one_that_runs(house: Cluster) -> None:
    first = await running(house)
    await hold_device(house, first)
    second = await house.submit(served("second"))
    await house.until(second, lambda job: "at place 1" in job.activity)
    with pytest.raises(FailedPrecondition, match="1 x H100, of which 1 are free"):
        await house.submit(served("greedy").replace("replicas: 1", "replicas: 2"))
    await house.cancel(first)
    assert (await house.wait(second)).state == SUCCEEDED


async def test_devices_of_an_ended_job_are_free_for_the_next_one(cluster: Cluster) -> None:
    text = served("first")
    first = await cluster.submit(text)
    await hold_device(cluster, first)
    # The job's own engines do not stand in its way when its submission is repeated.
    assert await cluster.submit(text, first) == first
    await cluster.wait(first, [SUCCEEDED])
    assert (await cluster.wait(await cluster.submit(served("second")))).state == SUCCEEDED


async def test_a_waiting_job_can_be_paused_and_cancelled(house: Cluster) -> None:
    first = await running(house)
    paused, cancelled, last = [await house.submit(one(name)) for name in ("a", "b", "c")]
    await house.until(last, lambda job: "at place 3" in job.activity)
    await house.pause(paused)
    await house.wait(paused, (common_pb.JOB_STATE_PAUSED,))
    await house.cancel(cancelled)
    assert (await house.wait(cancelled)).state == common_pb.JOB_STATE_CANCELLED
    await house.until(last, lambda job: "at place 1," in job.activity)
    await house.cancel(first)
    assert (await house.wait(last)).state == SUCCEEDED
    await house.resume(paused)
    assert (await house.wait(paused)).state == SUCCEEDED


async def test_a_running_job_keeps_its_place_over_a_restart(house: Cluster) -> None:
    first = await running(house)
    waiting = await house.submit(one("waiting", 100))
    await house.stop_orchestrator()
    await house.start_orchestrator()
    await house.until(waiting, lambda job: "in the queue of jobs" in job.activity)
    done = (await house.job(first)).step
    await house.until(first, lambda job: job.step > done)
    assert (await house.job(waiting)).state == common_pb.JOB_STATE_SUBMITTED
    await house.cancel(first)
    assert (await house.wait(waiting)).state == SUCCEEDED


async def test_a_priority_is_so_many_minutes_of_waiting_and_no_more() -> None:
    queue = JobQueue(1)
    order: list[str] = []

    async def run(job_id: str, priority: int, submitted_at: float) -> None:
        await queue.enter(job_id, priority, submitted_at, lambda before: None)
        order.append(job_id)

    await run("first", 0, 0.0)
    tasks = [
        asyncio.create_task(run(*job))
        for job in (("old", 0, 100.0), ("in time", 5, 399.0), ("too late", 5, 401.0))
    ]
    await asyncio.sleep(0)  # all of them stand in line
    for done in range(1, 4):
        queue.leave(order[-1])
        await until(lambda done=done: len(order) > done)
    assert order == ["first", "in time", "old", "too late"]
    await asyncio.gather(*tasks)


async def test_a_job_with_priority_has_the_trainer_first_and_the_other_one_still_trains(
    empty_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, one trainer with one slot: work of the job with priority never gives way."""
    gave_way: list[tuple[str, str]] = []

    def watched(
        rules: binding.BindingRules,
        policies: list[binding.Policy],
        workers: list[binding.RankWorker],
        now: float,
    ) -> binding.BindingPlan:
        plan = decide(rules, policies, workers, now)
        work = {one.policy: one.work for one in policies}
        gave_way.extend(
            (move.policy.partition("/")[2], move.after.partition("/")[2])
            for move in plan.moves
            if isinstance(move, binding.Suspend) and work[move.policy]
        )
        return plan

    decide = binding.decide
    monkeypatch.setattr(binding, "decide", watched)
    cluster = Cluster(empty_redis, tmp_path)
    try:
        await cluster.open()
        await cluster.add_rollout()
        await cluster.add_trainer(TrainerScript(slots=1, seconds=0.1))
        low = await cluster.submit(one("low", pipeline__steps=12))
        await cluster.until(low, lambda job: job.step >= 1)
        high = await cluster.submit(one("high", 10, pipeline__steps=6))
        for job_id, steps in ((high, 6), (low, 12)):
            job = await cluster.wait(job_id)
            assert (job.state, job.step) == (SUCCEEDED, steps), job.problem
        assert ("high", "low") not in gave_way
    finally:
        await cluster.close()


@pytest.mark.parametrize("priority", [101, -101, 1.5, "high"])
def test_a_priority_out_of_bounds_is_refused(priority: object) -> None:
    with pytest.raises(JobSpecError) as refused:
        parse_job(job_yaml(priority=priority))
    assert refused.value.problems[0].field == "priority"
