"""Trajectories that fail by a fault of the job's code: one is borne, a whole step ends the job."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

POLICIES = ("checker", "solver")
MODES = ("serial", "sync", "micro_batch", "async")
MISSING = common_pb.Problem(
    kind="reward_missing",
    message="a turn of solver has no reward",
    field="workflow",
    remedy="Return one.",
)
UNKNOWN = common_pb.Problem(kind="unknown_agent", message="no agent x", field="agents")


def lenient(**over: Any) -> str:
    """A job that bears any fraction of failures."""
    return job_yaml(**{"limits__max_failed_fraction": 1.0, **over})


def fail_where(
    cluster: Cluster, wanted: Callable[[rollout_pb.Ticket], common_pb.Problem | None]
) -> None:
    cluster.rollouts[0].script.fail = wanted


@pytest.mark.parametrize("mode", MODES)
async def test_a_trajectory_without_a_reward_ends_alone(cluster: Cluster, mode: str) -> None:
    def is_first(one: rollout_pb.Ticket) -> bool:
        return one.index == 0 and one.trajectory_id.endswith("t0")

    fail_where(cluster, lambda one: MISSING if is_first(one) else None)
    job_id = await cluster.submit(job_yaml(pipeline__mode=mode))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 2, POLICIES)
    told = "step 1: 1 of 4 trajectories failed, most of them with: reward_missing: a turn of solver"
    notices = await cluster.notices(job_id)
    assert any(text.startswith(told) for text in notices), notices


@pytest.mark.parametrize("mode", MODES)
async def test_a_step_that_fails_as_a_whole_ends_a_job_that_bears_failures(
    cluster: Cluster, mode: str
) -> None:
    fail_where(cluster, lambda one: MISSING)
    job = await cluster.wait(await cluster.submit(lenient(pipeline__mode=mode)))
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("reward_missing", "workflow")
    assert job.problem.remedy == "Return one."
    assert job.problem.message.startswith("a turn of solver has no reward (step 1: all 4 ")
    assert cluster.rollouts[0].calls["ReleaseJob"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_later_step_that_fails_as_a_whole_ends_the_job(cluster: Cluster, mode: str) -> None:
    fail_where(cluster, lambda one: MISSING if one.index in (2, 3) else None)
    job = await cluster.wait(await cluster.submit(lenient(pipeline__mode=mode)))
    assert job.problem.kind == "reward_missing"
    assert "step 2" in job.problem.message


async def test_failures_over_the_limit_are_told_by_their_common_problem(cluster: Cluster) -> None:
    fail_where(cluster, lambda one: UNKNOWN)
    job = await cluster.wait(await cluster.submit(job_yaml()))
    assert (job.problem.kind, job.problem.field) == ("unknown_agent", "agents")
    # At the third; of four, the last may have ended by then.
    assert re.search("all [34] ended trajectories failed with this", job.problem.message)


async def test_failures_of_several_kinds_do_not_end_a_job_that_bears_them(cluster: Cluster) -> None:
    fail_where(cluster, lambda one: MISSING if one.trajectory_id.endswith("t0") else UNKNOWN)
    job = await cluster.wait(await cluster.submit(lenient()))
    assert job.problem.kind not in {"reward_missing", "unknown_agent"}


@pytest.mark.parametrize("size", [(1, 8), (2, 1)])
async def test_a_small_step_that_fails_as_a_whole_does_not_end_the_job(
    cluster: Cluster, size: tuple[int, int]
) -> None:
    """A step with one query whose row lacks its answer, or with two trajectories, proves
    nothing."""
    queries, group = size
    fail_where(cluster, lambda one: MISSING if one.index < queries else None)
    job_id = await cluster.submit(
        lenient(pipeline__queries_per_step=queries, pipeline__group_size=group)
    )
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem


async def test_small_steps_that_fail_as_a_whole_are_counted_together(cluster: Cluster) -> None:
    fail_where(cluster, lambda one: MISSING)
    text = lenient(pipeline__queries_per_step=1, pipeline__group_size=1, pipeline__steps=9)
    job = await cluster.wait(await cluster.submit(text))
    assert job.problem.kind == "reward_missing"
    assert "step 4" in job.problem.message
