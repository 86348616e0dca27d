"""Jobs with a curriculum: tasks are chosen by how often they were solved, also after restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.scheduling.curriculum import TaskChoice, TaskPool, choice_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

POLICIES = ("checker", "solver")
ITEMS = 12


def solved(ticket: rollout_pb.Ticket) -> bool:
    """Items 0, 3, 6, 9 are solved by every second trajectory, 1, 4, ... always, 2, 5, ... never."""
    kind = ticket.task.item % 3
    return kind == 1 or (kind == 0 and ticket.trajectory_id.endswith("t0"))


def curriculum_yaml(**over: Any) -> str:
    fields = {
        "curriculum__explore": 0.25,
        "curriculum__replay": 0.1,
        "pipeline__queries_per_step": 4,
        "pipeline__steps": 8,
    }
    return job_yaml(**(fields | over))


async def choices(cluster: Cluster, job_id: str, steps: int) -> list[list[TaskChoice]]:
    found = [(await cluster.step(job_id, step)).query_ids for step in range(steps)]
    return [[one for name in ids if (one := choice_of(name)) is not None] for ids in found]


async def run(cluster: Cluster, text: str, steps: int) -> list[list[TaskChoice]]:
    script = cluster.rollouts[0].script
    script.task_items, script.solved = (ITEMS,), solved
    job_id = await cluster.submit(text)
    return await finish(cluster, job_id, steps)


async def finish(cluster: Cluster, job_id: str, steps: int) -> list[list[TaskChoice]]:
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, steps, POLICIES)
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    assert not audit.violations, list(audit.violations)
    return await choices(cluster, job_id, steps)


async def test_tasks_within_the_band_are_asked_most(cluster: Cluster) -> None:
    asked = await run(cluster, curriculum_yaml(pipeline__mode="sync"), 8)
    # Nothing is known: all are new, in order.
    assert [(one.pool, one.item) for one in asked[0]] == [(TaskPool.NEW, n) for n in range(4)]
    # Tasks asked as within the band were solved sometimes, and so on.
    kinds = {TaskPool.WITHIN: 0, TaskPool.SOLVED: 1, TaskPool.FAILED: 2}
    every = [one for step in asked for one in step]
    assert all(one.item % 3 == kinds[one.pool] for one in every if one.pool in kinds)
    assert {one.item for one in every} == set(range(ITEMS)), "none starves"
    counts = Counter(one.item % 3 for step in asked[4:] for one in step)
    assert counts[0] > 2 * max(counts[1], counts[2])
    # Queries are named after the tasks that rollout workers get.
    for ticket in cluster.rollouts[0].tickets:
        choice = choice_of(ticket.query_id)
        assert choice is not None
        assert (choice.source, choice.item) == (ticket.task.source, ticket.task.item)


@pytest.mark.parametrize("mode", ["sync", "micro_batch"])
async def test_a_restarted_job_asks_the_same_queries(cluster: Cluster, mode: str) -> None:
    text = curriculum_yaml(pipeline__mode=mode, pipeline__deterministic=True)
    undisturbed = await run(cluster, text, 8)
    cluster.rollouts[0].script.seconds = 0.05
    job_id = await cluster.submit(text)
    for pause in (0.3, 0.45, 0.35, 0.4):
        await asyncio.sleep(pause)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    assert await finish(cluster, job_id, 8) == undisturbed


async def test_steps_that_overlap_choose_one_after_another(cluster: Cluster) -> None:
    """Mode async, with queries that join and are carried over: every number is used once, and no
    task starves. (A task whose query has ended may be asked again in the same step: each choice
    knows what has ended by then.)"""
    cluster.rollouts[0].script.reward = lambda ticket: {
        "solver": float(solved(ticket)),
        "checker": float(solved(ticket)),
    }
    text = curriculum_yaml(
        pipeline__mode="async",
        pipeline__alpha=2,
        pipeline__queries_per_step=2,
        pipeline__over_sampling=1,
        pipeline__dynamic_sampling=True,
        pipeline__steps=10,
    )
    asked = await run(cluster, text, 10)
    numbers = [one.number for step in asked for one in step]
    assert len(set(numbers)) == len(numbers)
    assert {one.item for step in asked for one in step} == set(range(ITEMS))


async def test_metrics_report_the_chosen_tasks(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.task_items, script.solved = (9,), solved
    job_id = await cluster.submit(curriculum_yaml(pipeline__steps=3))
    await finish(cluster, job_id, 3)
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    first, *_, last = [row.values for row in rows if "step/seconds" in row.values]
    assert (first["curriculum/explored"], first["curriculum/in_band"]) == (1, 0)
    assert first["curriculum/tasks/new"] == 9
    names = ("explored", "in_band", "replayed", "reviewed", "repeated")
    assert sum(last[f"curriculum/{name}"] for name in names) == 1
    known = ("new", "in_band", "below_band", "above_band")
    assert sum(last[f"curriculum/tasks/{name}"] for name in known) == 9


async def test_workers_of_another_release_are_named(cluster: Cluster) -> None:
    job_id = await cluster.submit(curriculum_yaml())
    job = await cluster.wait(job_id)
    assert (job.state, job.problem.kind) == (common_pb.JOB_STATE_FAILED, "tasks_differ")
