"""Redundant trajectories: the first of a group to complete are trained, the rest is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestrator.pipeline.metrics import Redundancy
from tests.orchestrator.test_orchestrator_rosters import finish, step_rows, varied
from tests.support.cluster import Cluster, job_yaml
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

MODES = ["serial", "sync", "micro_batch", "async"]


def number(ticket: rollout_pb.Ticket) -> int:
    return int(ticket.trajectory_id.rpartition("-t")[2])


def failing(ticket: rollout_pb.Ticket) -> str:
    """The trajectory of a ticket's group that fails."""
    return ticket.trajectory_id.rpartition("-t")[0] + "-t2"


@pytest.mark.parametrize("mode", MODES)
async def test_the_first_of_a_group_are_trained(cluster: Cluster, mode: str) -> None:
    """One of every four fails and one never ends: the two others are the group."""
    rollout = cluster.rollouts[0]
    rollout.script.slow = lambda ticket: 1000 if number(ticket) == 1 else 0.0
    # The failure comes before the group is complete: after that, it would be cancelled.
    rollout.script.after = lambda ticket: failing(ticket) if number(ticket) in (0, 3) else None
    rollout.script.fail = lambda ticket: "tool_failed: no" if number(ticket) == 2 else None
    text = job_yaml(pipeline__mode=mode, pipeline__redundant_trajectories=2, pipeline__steps=3)
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 3)
    for row in await step_rows(cluster, job_id):
        assert row.values["solver/samples"] == 4
        assert row.values["trajectories/completed"] == 4
        assert row.values["trajectories/failed"] == 2
        assert row.values["redundancy/failures_replaced"] == 2
        assert row.values["redundancy/cancelled"] == 2
        assert row.values["redundancy/kept_turns"] == 2
        assert row.values["redundancy/cancelled_turns"] == 0
        assert row.values["redundancy/cancelled_seconds"] > 0
    # A member whose end the store told before its worker did may be cancelled too, in vain.
    aborted = {one for call in rollout.abort_calls for one in call.trajectory_ids}
    assert len([one for one in aborted if one.endswith("-t1")]) == 6
    assert {call.reason for call in rollout.abort_calls} == {"redundant"}
    tables = (await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))).tables
    assert dict(tables.trajectories_by_state) == {"COMPLETED": 12, "FAILED": 6, "ABORTED": 6}


@pytest.mark.parametrize("mode", MODES)
async def test_members_that_are_told_late_count(cluster: Cluster, mode: str) -> None:
    """The second of a group ends first in the store, and is reported last, after the group."""
    rollout = cluster.rollouts[0]
    rollout.script.slow = lambda ticket: (0.1, 0.0, 1000, 1000)[number(ticket)]
    rollout.script.late = lambda ticket: 0.4 if number(ticket) == 1 else 0.0
    text = job_yaml(pipeline__mode=mode, pipeline__redundant_trajectories=2, pipeline__steps=2)
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 2)
    for row in await step_rows(cluster, job_id):
        assert row.values["trajectories/completed"] == 4
        assert row.values["redundancy/cancelled"] == 4


async def test_a_member_that_is_never_told_is_not_waited_for(cluster: Cluster) -> None:
    """Its worker's stream breaks after the group was complete."""
    await cluster.add_rollout()
    for rollout in cluster.rollouts:
        rollout.script.slow = lambda ticket: (0.1, 0.0, 1000, 1000)[number(ticket)]
        rollout.script.late = lambda ticket: 1000 if number(ticket) == 1 else 0.0
        rollout.script.break_after = 1
    text = job_yaml(pipeline__redundant_trajectories=2, pipeline__steps=1)
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 1)
    tables = (await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))).tables
    assert tables.trajectories_by_state["COMPLETED"] == 4


async def test_with_spare_queries_and_groups_without_signal(cluster: Cluster) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.reward = varied
    rollout.script.slow = lambda ticket: 1000 if number(ticket) == 2 or ticket.index == 4 else 0.0
    text = job_yaml(
        pipeline__redundant_trajectories=1,
        pipeline__over_sampling=1,
        pipeline__dynamic_sampling=True,
        pipeline__steps=2,
    )
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 2)
    for row in await step_rows(cluster, job_id):
        assert row.values["solver/samples"] == 4


@pytest.mark.parametrize("mode", ["micro_batch", "async"])
async def test_restarts_and_lost_workers_change_no_group(cluster: Cluster, mode: str) -> None:
    """Workers break their streams without reporting stored endings; the orchestrator dies twice."""
    await cluster.add_rollout()
    for rollout in cluster.rollouts:
        rollout.script.slow = lambda ticket: 0.03 * number(ticket)
        rollout.script.break_after, rollout.script.silent = 5, True
    text = job_yaml(
        pipeline__mode=mode,
        pipeline__redundant_trajectories=2,
        pipeline__steps=5,
        pipeline__queries_per_step=3,
    )
    job_id = await cluster.submit(text)
    for pause in (0.5, 0.6):
        await asyncio.sleep(pause)
        await cluster.stop_orchestrator()
        for rollout in cluster.rollouts:
            rollout.script.break_after, rollout.script.silent = 4, True
        await cluster.start_orchestrator()
    await finish(cluster, job_id, 5)
    for step in range(5):
        for counts in (await cluster.step(job_id, step)).counts:
            assert counts.trained == 6
    tables = (await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))).tables
    assert tables.trajectories_admitted == tables.trajectories_ended == 5 * 3 * 4
    assert tables.trajectories_by_state["COMPLETED"] == 5 * 3 * 2


def ended(
    query: str, state: int, tokens: int, seconds: float, reason: str = ""
) -> rollout_pb.TrajectoryEvent:
    return rollout_pb.TrajectoryEvent(
        query_id=query,
        state=state,  # type: ignore[arg-type]
        reason=reason,
        seconds=seconds,
        turns=[rollout_pb.Turn(response_tokens=tokens)] * 2,
    )


def test_the_bias_of_taking_the_first_is_measured() -> None:
    found = Redundancy(1)
    found.add(ended("q0", common_pb.TRAJECTORY_STATE_COMPLETED, 10, 1.0))
    found.add(ended("q0", common_pb.TRAJECTORY_STATE_COMPLETED, 20, 2.0))
    found.add(ended("q0", common_pb.TRAJECTORY_STATE_ABORTED, 30, 4.0, "redundant"))
    found.add(ended("q1", common_pb.TRAJECTORY_STATE_ABORTED, 90, 9.0, "surplus"))
    found.add(ended("q1", common_pb.TRAJECTORY_STATE_ABORTED, 0, 0.0, "redundant"))
    for _ in range(2):
        found.add(ended("q2", common_pb.TRAJECTORY_STATE_FAILED, 5, 1.0, "deadline: 9 s"))
    assert found.values() == {
        "redundancy/cancelled": 2,
        "redundancy/unstarted": 1,
        "redundancy/failures_replaced": 1,
        "redundancy/kept_tokens": 30,
        "redundancy/kept_turns": 2,
        "redundancy/kept_seconds": 1.5,
        "redundancy/cancelled_tokens": 60,
        "redundancy/cancelled_turns": 2,
        "redundancy/cancelled_seconds": 4,
    }
    assert Redundancy(0).values() == {}
