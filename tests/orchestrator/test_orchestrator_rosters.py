"""Steps whose queries join and leave: dynamic sampling, the first to finish, carrying over."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.pipeline.step_queries import StepQueries
from services.orchestrator.pipeline.steps import StepContext, StepRollout
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import until
from troupe.scheduling.curriculum import number_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

POLICIES = ("checker", "solver")
MODES = ["serial", "sync", "micro_batch"]


def varied(ticket: rollout_pb.Ticket) -> dict[str, float]:
    """Rewards that differ within a group, except for every third query."""
    good = float(ticket.index % 3 == 0 or ticket.trajectory_id.endswith("t0"))
    return {"solver": good, "checker": good}


async def index_sets(cluster: Cluster, job_id: str, steps: int) -> list[list[int]]:
    """Return the contents of every step."""
    found = [(await cluster.step(job_id, step)).query_ids for step in range(steps)]
    return [sorted(number_of(one) for one in ids) for ids in found]


async def step_rows(cluster: Cluster, job_id: str) -> list[orchestrator_pb.MetricsLogged]:
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    return [row for row in rows if "step/seconds" in row.values]


async def finish(cluster: Cluster, job_id: str, steps: int) -> orchestrator_pb.Job:
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, steps, POLICIES)
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    assert not audit.violations, list(audit.violations)
    return job


def dynamic_yaml(**over: Any) -> str:
    return job_yaml(
        **{"pipeline__dynamic_sampling": True, "pipeline__steps": 3, **over},
    )


@pytest.mark.parametrize("mode", MODES)
async def test_groups_without_signal_are_replaced(cluster: Cluster, mode: str) -> None:
    """q0, q3, q6, ... teach nothing. Each is followed by a fresh query, and no item of the split
    is left out or taken twice."""
    cluster.rollouts[0].script.reward = varied
    job_id = await cluster.submit(dynamic_yaml(pipeline__mode=mode))
    await finish(cluster, job_id, 3)
    # Two queries each, and one more for each multiple of three.
    assert await index_sets(cluster, job_id, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for row in await step_rows(cluster, job_id):
        assert row.values["queries/trained"] == 3
        assert row.values["queries/joined"] == 1
        assert row.values["solver/samples"] == 4


async def test_refills_have_a_bound(cluster: Cluster) -> None:
    cluster.rollouts[0].script.reward = lambda ticket: {"solver": 1.0, "checker": 0.5}
    job_id = await cluster.submit(dynamic_yaml(pipeline__max_refills=3, pipeline__steps=2))
    job = await finish(cluster, job_id, 2)
    assert await index_sets(cluster, job_id, 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert dict(job.versions) == {"solver": 0, "checker": 0}, "there was nothing to learn"


@pytest.mark.parametrize("mode", MODES)
async def test_the_first_to_finish_are_taken(cluster: Cluster, mode: str) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.slow = lambda ticket: 1000 if ticket.index % 3 == 1 else 0.0
    text = job_yaml(pipeline__mode=mode, pipeline__over_sampling=1, pipeline__steps=3)
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 3)
    # The slow 1 of [0, 1, 2] is left, the 4 of [3, 4, 5], ...
    for row in await step_rows(cluster, job_id):
        assert row.values["queries/trained"] == 2
        assert row.values["queries/left"] == 1
        assert row.values["trajectories/failed"] == 0
    for step in range(3):
        for counts in (await cluster.step(job_id, step)).counts:
            assert counts.trained == 4
    aborted = {one for call in rollout.abort_calls for one in call.trajectory_ids}
    assert aborted == {f"q{q}-s{s}-t{t}" for s, q in enumerate((1, 4, 7)) for t in (0, 1)}
    assert {call.reason for call in rollout.abort_calls} == {"surplus"}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_restart_takes_no_query_twice_and_leaves_none_out(
    cluster: Cluster, mode: str
) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.reward = varied
    rollout.script.seconds = 0.08
    rollout.script.slow = lambda ticket: 0.1 * (ticket.index % 2)
    steps = 6
    text = dynamic_yaml(
        pipeline__mode=mode, pipeline__alpha=2, pipeline__over_sampling=1, pipeline__steps=steps
    )
    job_id = await cluster.submit(text)
    for pause in (0.4, 0.6, 0.5):
        await asyncio.sleep(pause)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    await finish(cluster, job_id, steps)
    cursor = max([(await cluster.step(job_id, step)).cursor for step in range(steps)])
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    tables = audit.tables
    assert tables.trajectories_admitted == tables.trajectories_ended == 2 * cursor
    kept = [one for ids in await index_sets(cluster, job_id, steps) for one in ids]
    assert len(set(kept)) == len(kept), "no query in two steps"
    assert set(kept) <= set(range(cursor))


async def test_queries_are_not_carried_to_a_step_that_is_being_opened(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = StepQueries.open

    async def opens_slowly(self: StepQueries, *arguments: Any) -> None:
        await asyncio.sleep(0.4)
        await really_open(self, *arguments)

    monkeypatch.setattr(StepQueries, "open", opens_slowly)
    rollout = cluster.rollouts[0]
    rollout.script.seconds = 0.03
    rollout.script.slow = lambda ticket: 0.4 if ticket.index % 4 == 1 else 0.0
    steps = 4
    text = job_yaml(
        pipeline__mode="async",
        pipeline__alpha=2,
        pipeline__over_sampling=1,
        pipeline__steps=steps,
    )
    await finish(cluster, await cluster.submit(text), steps)


async def test_async_goes_on_with_what_was_not_finished(cluster: Cluster) -> None:
    """Slow queries move to the next step; those that would be too old there are dropped."""
    rollout = cluster.rollouts[0]
    rollout.script.seconds = 0.03
    rollout.script.slow = lambda ticket: 0.25 if ticket.index % 4 == 1 else 0.0
    cluster.trainers[0].script.seconds = 0.05
    steps = 8
    text = job_yaml(
        pipeline__mode="async",
        pipeline__alpha=2,
        pipeline__over_sampling=1,
        pipeline__steps=steps,
    )
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, steps)
    rows = await step_rows(cluster, job_id)
    for row in rows:
        assert row.values["staleness/max"] <= 2
        assert row.values["queries/trained"] >= 2
    reasons = {call.reason for call in rollout.abort_calls}
    assert reasons <= {"stale", "surplus"}


async def test_a_job_that_was_cancelled_goes_on_with_a_smaller_alpha(cluster: Cluster) -> None:
    """More steps are open then than the job would open now: all of them are gone on with."""
    cluster.rollouts[0].script.reward = varied
    cluster.rollouts[0].script.seconds = 0.03
    trainer = cluster.trainers[0]
    trainer.script.slow = dict.fromkeys(POLICIES, 4.0)
    text = {"pipeline__mode": "async", "pipeline__steps": 6}
    job_id = await cluster.submit(dynamic_yaml(**text, pipeline__alpha=3))
    await cluster.wait(job_id, (common_pb.JOB_STATE_RUNNING,))

    async def is_closed() -> bool:
        return bool((await cluster.step(job_id, 3)).closed)

    await until(is_closed)
    await cluster.api.CancelJob(orchestrator_pb.CancelJobRequest(request_id="c", job_id=job_id))
    await cluster.wait(job_id, (common_pb.JOB_STATE_CANCELLED,))
    trainer.script.slow = {}
    await cluster.resume(job_id, dynamic_yaml(**text, pipeline__alpha=1))
    await finish(cluster, job_id, 6)
    taken = sorted(itertools.chain.from_iterable(await index_sets(cluster, job_id, 6)))
    assert taken == list(range(len(taken))), "no item is left out or taken twice"


def test_a_version_that_a_trainer_has_reported_counts_once_its_commit_is_noted() -> None:
    """Before, the step still to be committed would count in addition to its own version."""
    trainer = SimpleNamespace(weights=SimpleNamespace(version=0))
    context: Any = SimpleNamespace(
        job=SimpleNamespace(spec=SimpleNamespace(alpha_of=lambda policy: 2)),
        trainers=SimpleNamespace(policies={"solver": trainer}),
        committed={"solver": 0},
        versions={"solver": 0},
    )
    batch = SimpleNamespace(started={"q0": {"solver": 0}})
    step: Any = SimpleNamespace(batch=batch, _context=context)

    def too_old_in(number: int) -> bool:
        after: Any = SimpleNamespace(queries=SimpleNamespace(step=number))
        return StepRollout._too_old(step, "q0", after)

    assert [too_old_in(2), too_old_in(3)] == [False, True]
    trainer.weights.version = 1
    assert [too_old_in(2), too_old_in(3)] == [False, True]
    StepContext.note_commit(context, "solver", 0)
    assert [too_old_in(2), too_old_in(3)] == [False, True]


async def test_a_query_that_never_ends_is_dropped_as_stale(cluster: Cluster) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.seconds = 0.03
    rollout.script.slow = lambda ticket: 1000 if ticket.index == 0 else 0.0
    cluster.trainers[0].script.seconds = 0.03
    steps = 6
    text = job_yaml(
        pipeline__mode="async",
        pipeline__alpha=2,
        pipeline__over_sampling=1,
        pipeline__steps=steps,
    )
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, steps)
    stale = [call for call in rollout.abort_calls if call.reason == "stale"]
    assert {one for call in stale for one in call.trajectory_ids} >= {"q0-t0", "q0-t1"}
    assert not rollout._tasks, "nothing of it runs any more"
    # Begun by version 0, it could still be trained in steps 1 and 2.
    carried = [row.values["queries/carried_in"] for row in await step_rows(cluster, job_id)]
    assert carried[1] >= 1
    assert carried[2] >= 1
