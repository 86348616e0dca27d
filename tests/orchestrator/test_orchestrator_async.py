"""Mode async: steps overlap within the staleness bound, policies go their own ways."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from redis.asyncio import Redis

from services.orchestrator.pipeline.steps import StepRunner
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import RolloutScript
from tests.support.waiting import PATIENCE
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")
RUNNING = (common_pb.JOB_STATE_RUNNING,)


def async_yaml(**over: Any) -> str:
    """An async job of six steps."""
    return job_yaml(**{"pipeline__mode": "async", "pipeline__steps": 6, **over})


async def rows_of(cluster: Cluster, job_id: str) -> list[orchestrator_pb.MetricsLogged]:
    """The logged rows of training steps."""
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    return [row for row in rows if "step/seconds" in row.values]


@pytest.mark.parametrize("alpha", [1, 2, 4])
async def test_staleness_stays_within_the_bound(cluster: Cluster, alpha: int) -> None:
    rollout, trainer = cluster.rollouts[0], cluster.trainers[0]
    # Some trajectories are slow, so that engines move on below them.
    rollout.script = RolloutScript(
        seconds=0.02, slow=lambda ticket: 0.15 if ticket.index % 3 == 0 else 0.0
    )
    trainer.script.seconds = 0.03
    job_id = await cluster.submit(async_yaml(pipeline__alpha=alpha, pipeline__steps=8))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 8, POLICIES)
    rows = await rows_of(cluster, job_id)
    assert [row.step for row in rows] == list(range(1, 9)), "steps end in order"
    for row in rows:
        for policy in POLICIES:
            assert 0 <= row.values[f"{policy}/staleness/max"] <= alpha
        assert row.values["staleness/max"] <= alpha
        assert row.values["staleness/mean"] <= row.values["staleness/max"]
    assert max(row.values["staleness/max"] for row in rows) >= 1, "steps did overlap"
    for request in trainer.requests:
        assert request.oldest_version == max(0, request.version - alpha)
    ahead = max(b - a for a, b in rollout.overlaps)
    assert 1 <= ahead <= alpha
    # Admission alone keeps the bound: nothing had to be thrown away.
    for step in range(8):
        for counts in (await cluster.step(job_id, step)).counts:
            assert not counts.dropped, counts


async def test_steps_that_are_over_are_not_kept_in_memory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps refer to the one before while that is open. Each may hold what 10,000 conversations
    were measured to do, so no chain of them may be left over."""
    made: list[weakref.ref[StepRunner]] = []
    most = 0

    def note(runner: StepRunner, *args: Any) -> None:
        nonlocal most
        made_before(runner, *args)
        made.append(weakref.ref(runner))
        gc.collect()
        most = max(most, sum(one() is not None for one in made))

    made_before = StepRunner.__init__
    monkeypatch.setattr(StepRunner, "__init__", note)
    cluster.rollouts[0].script.seconds = 0.02
    job_id = await cluster.submit(async_yaml(pipeline__alpha=1, pipeline__steps=12))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert len(made) == 12
    # Two are open at once, and one of them may have ended just now.
    assert 2 <= most <= 3


async def test_a_policy_may_lead_another_by_its_own_bound(cluster: Cluster) -> None:
    """The checker's bound is 3, the solver's 1: the solver decides when steps open, and the
    checker is not held up by the solver's slow training."""
    trainer = cluster.trainers[0]
    trainer.script.slow = {"solver": 0.1}
    cluster.rollouts[0].script.seconds = 0.01
    text = async_yaml(pipeline__alpha=1, policies__checker__alpha=3)
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 6, POLICIES)
    order = [(one.policy, one.step) for one in trainer.requests]
    for policy in POLICIES:
        assert [step for name, step in order if name == policy] == list(range(6))
    # The checker began a step that the solver had not finished the one before of.
    assert order.index(("checker", 2)) < order.index(("solver", 2))
    for one in trainer.requests:
        alpha = {"solver": 1, "checker": 3}[one.policy]
        assert one.oldest_version == max(0, one.version - alpha)


async def test_the_window_of_trajectories_is_the_jobs(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.05
    most = 0
    text = async_yaml(
        pipeline__alpha=3, pipeline__group_size=2, limits__max_concurrent_trajectories=6
    )
    job_id = await cluster.submit(text)
    while (await cluster.job(job_id)).state not in (
        common_pb.JOB_STATE_SUCCEEDED,
        common_pb.JOB_STATE_FAILED,
    ):
        shared = cluster.orchestrator.service._at.shared  # type: ignore[union-attr]
        most = max(most, shared.in_flight.get(job_id, 0))
        await asyncio.sleep(0.005)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    # Two steps have 8 trajectories; more than one step's four ran at once, never more than 6.
    assert 4 < most <= 6


async def test_evaluations_and_checkpoints_see_no_open_step(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.02
    text = async_yaml(
        pipeline__alpha=2, evaluation__queries=2, evaluation__every=2, checkpoint__every=3
    )
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    kinds = [("evaluation/reward/mean" in row.values, row.step) for row in rows]
    assert kinds == [
        (True, 0),
        (False, 1),
        (False, 2),
        (True, 2),
        (False, 3),
        (False, 4),
        (True, 4),
        (False, 5),
        (False, 6),
        (True, 6),
    ]
    saved = await cluster.api.ListCheckpoints(orchestrator_pb.ListCheckpointsRequest(job_id=job_id))
    assert {one.version for one in saved.checkpoints} == {3, 6}


@pytest.mark.parametrize("how", ["restart", "pause", "cancel"])
async def test_open_steps_are_taken_up_again(cluster: Cluster, how: str) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.seconds = 0.1
    cluster.trainers[0].script.seconds = 0.05
    job_id = await cluster.submit(async_yaml(pipeline__alpha=2))
    await cluster.until(job_id, lambda job: "more step" in job.activity)
    for _ in range(3 if how == "restart" else 1):
        await asyncio.sleep(0.12)
        if how == "restart":
            await cluster.stop_orchestrator()
            await cluster.start_orchestrator()
        elif how == "pause":
            await cluster.pause(job_id)
            paused = await cluster.wait(job_id, (common_pb.JOB_STATE_PAUSED,))
            # Open steps are over: nothing waits in the store.
            assert not (await cluster.step(job_id, paused.step)).open
            await cluster.resume(job_id)
        else:
            await cluster.cancel(job_id)
            stopped = await cluster.wait(job_id)
            assert (await cluster.step(job_id, stopped.step + 1)).open, "two steps were open"
            await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 6, POLICIES)
    queries = [q for n in range(6) for q in (await cluster.step(job_id, n)).query_ids]
    assert sorted(queries) == sorted(f"q{n}" for n in range(12)), "no query twice or left out"
    assert [row.step for row in await rows_of(cluster, job_id)] == [1, 2, 3, 4, 5, 6]


async def test_reusable_samples_are_freed_at_the_end_of_the_job(cluster: Cluster) -> None:
    text = async_yaml(pipeline__alpha=2, pipeline__max_uses=2)
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    # A step also trains what the one before it did, as far as that is not too old by then.
    rows = await rows_of(cluster, job_id)
    samples = [row.values["solver/samples"] for row in rows]
    assert samples[:2] == [4, 8]
    assert set(samples) <= {4, 8}
    assert max(row.values["staleness/max"] for row in rows) <= 2
    # The job is over, and soon so are its tables: none of its payloads is left.
    redis = Redis.from_url(cluster.settings.redis_url)
    async with asyncio.timeout(PATIENCE):
        while True:
            if not [key async for key in redis.scan_iter(f"*{job_id}*") if b":rows:" in key]:
                break
            await asyncio.sleep(0.05)
    await redis.aclose()
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    assert not audit.violations, list(audit.violations)
    for policy in audit.tables.policies:
        assert policy.lost == policy.duplicated == 0
        assert policy.steps_applied == 6


async def test_a_failure_in_a_later_step_ends_the_job_and_can_be_mended(cluster: Cluster) -> None:
    rollout = cluster.rollouts[0]
    rollout.script.seconds = 0.02
    rollout.script.fail = lambda ticket: "broken" if ticket.index >= 6 else None
    job_id = await cluster.submit(async_yaml(pipeline__alpha=2, limits__max_failed_fraction=0.1))
    job = await cluster.wait(job_id)
    assert job.problem.kind == "too_many_failed_trajectories"
    rollout.script.fail = lambda ticket: None
    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 6, POLICIES)


async def test_a_skipped_update_does_not_delay_later_steps(cluster: Cluster) -> None:
    cluster.trainers[0].script.skip = frozenset({1, 2})
    job_id = await cluster.submit(async_yaml(pipeline__alpha=2))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert dict(job.versions) == {"solver": 4, "checker": 4}
    await cluster.check_accounts(job_id, 6, POLICIES)


async def test_workers_may_die_while_steps_overlap(cluster: Cluster) -> None:
    rollout, trainer = cluster.rollouts[0], cluster.trainers[0]
    rollout.script = RolloutScript(seconds=0.05, break_after=3, die=True)
    trainer.script.seconds = 0.05
    trainer.script.die_when = "committed"
    job_id = await cluster.submit(async_yaml(pipeline__alpha=2))
    await rollout.death()
    await cluster.add_rollout(RolloutScript(seconds=0.02))
    await trainer.death()
    await cluster.add_trainer()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 6, POLICIES)


async def test_no_step_opens_while_the_store_is_too_full(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full store: the job continues step by step, as if its bound were 0."""
    from services.experience_store import store

    plain = store.table_status

    def full(*what: Any) -> store_pb.TableStatus:
        message = plain(*what)
        message.over_high_water = True
        return message

    monkeypatch.setattr(store, "table_status", full)
    cluster.rollouts[0].script.seconds = 0.03
    job_id = await cluster.submit(async_yaml(pipeline__alpha=3))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    rows = await rows_of(cluster, job_id)
    # The first steps may have opened before the store said so.
    assert max(row.values["staleness/max"] for row in rows[4:]) == 0
