"""Jobs that kill their workers: they fail before they take the whole cluster with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.crash_loops import CrashLoopGuard, SharedDeaths
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import RolloutScript
from tests.support.fake_trainer import TrainerScript
from tests.support.fake_worker import FakeWorker
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


async def sacrifice(
    cluster: Cluster, job_id: str, first: FakeWorker, following: Callable[[], Awaitable[FakeWorker]]
) -> orchestrator_pb.Job:
    """Three workers, one after another; the job when it has ended."""
    await first.death()
    for _ in range(2):
        await (await following()).death()
    return await cluster.wait(job_id)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["preparing", "running"])
async def test_a_workflow_that_kills_every_worker_fails_its_job(
    cluster: Cluster, when: str
) -> None:
    def deadly() -> RolloutScript:
        if when == "preparing":
            return RolloutScript(die_preparing=True)
        return RolloutScript(seconds=1000, break_after=0, die=True)

    cluster.rollouts[0].script = deadly()
    job_id = await cluster.submit(job_yaml())
    job = await sacrifice(
        cluster, job_id, cluster.rollouts[0], lambda: cluster.add_rollout(deadly())
    )
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "workers_keep_dying"
    assert job.problem.field == ("policies" if when == "preparing" else "workflow")
    assert "3 rollout workers died one after another while each " in job.problem.message
    assert cluster.rollouts[0].worker_id in job.problem.message
    assert "logs" in job.problem.remedy
    # With the cause fixed it continues.
    await cluster.add_rollout()
    await cluster.resume(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


async def test_a_policy_that_kills_every_trainer_fails_its_job(cluster: Cluster) -> None:
    cluster.trainers[0].script.die_when = "claimed"
    job_id = await cluster.submit(job_yaml(policies=["solver"]))
    job = await sacrifice(
        cluster,
        job_id,
        cluster.trainers[0],
        lambda: cluster.add_trainer(TrainerScript(die_when="claimed")),
    )
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("workers_keep_dying", "policies.solver")
    assert "3 trainer workers died" in job.problem.message


async def test_the_job_says_how_many_deaths_are_too_many(cluster: Cluster) -> None:
    cluster.trainers[0].script.die_when = "claimed"
    text = job_yaml(policies=["solver"], limits__worker_deaths=1)
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.problem.kind == "workers_keep_dying"
    assert "a trainer worker died while it" in job.problem.message


async def test_streams_that_break_kill_nobody(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    worker.script = RolloutScript(seconds=0.01, break_after=0)
    job_id = await cluster.submit(job_yaml())
    for _ in range(4):
        await cluster.until(job_id, lambda job: worker.script.break_after is None)
        worker.script.break_after = 0
    worker.script.break_after = None
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


class Jobs:
    """Jobs that begin work on one worker whenever they may; the deadly ones end it."""

    def __init__(self, deadly: set[str], others: set[str], limit: int) -> None:
        self.now = 0.0
        self.deaths = SharedDeaths(lambda: self.now)
        self.deadly = deadly
        registry: Any = SimpleNamespace(all=list)
        self.running = {
            job: CrashLoopGuard(registry, self.deaths, job, limit, "did it", "workflow", "")
            for job in deadly | others
        }
        self.failed: list[str] = []

    def live_and_die(self, number: int, order: Callable[[list[str]], list[str]]) -> None:
        """One worker: jobs come to it in this order; one of them ends it, or a turn is over."""
        worker: Any = SimpleNamespace(
            worker_id=f"w{number}",
            kind=orchestrator_pb.WORKER_KIND_TRAINER,
            beat=SimpleNamespace(draining=False),
        )
        there = [job for job in order(sorted(self.running)) if self.deaths.may_begin(job)]
        killed = self.deadly.intersection(there)
        self.now += 3.0 if killed else 60.0
        for job in there:
            if killed:
                self.running[job].note(worker)
            else:
                self.running[job].clear()
        for job in there if killed else []:
            try:
                self.running[job].check()
            except FailedPrecondition:
                self.failed.append(job)
        for job in self.failed:
            if self.running.pop(job, None) is not None:
                self.deaths.end(job, blamed=True)


@given(
    deadly=st.sets(st.sampled_from("abcd"), max_size=2),
    others=st.sets(st.sampled_from("mnop"), max_size=3),
    limit=st.integers(1, 4),
    data=st.data(),
)
def test_deaths_that_jobs_share_fail_those_at_fault_alone(
    deadly: set[str], others: set[str], limit: int, data: st.DataObject
) -> None:
    jobs = Jobs(deadly, others, limit)
    for number in count():
        if not deadly.intersection(jobs.running):
            break
        assert number < 40 * len(deadly), "workers die for ever"
        jobs.live_and_die(number, lambda names: data.draw(st.permutations(names)))
    assert set(jobs.failed) == deadly
    assert set(jobs.running) == others
    # Nothing remains of ended steps.
    for job, victims in jobs.running.items():
        victims.clear()
        assert jobs.deaths.may_begin(job)


def test_a_job_that_ends_well_leaves_the_blame_to_those_that_stay() -> None:
    jobs = Jobs({"bad"}, {"good"}, 3)
    for number in range(2):
        jobs.live_and_die(number, list)
    jobs.deaths.end("good", blamed=False)
    del jobs.running["good"]
    jobs.live_and_die(2, list)
    assert jobs.failed == ["bad"]
