"""A job that did all its steps and taught nothing does not end as a plain success."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.support.cluster import ENDED, Cluster, job_yaml
from troupe.contracts.metric_names import UNUSED_ENDPOINT
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

WARNED = (orchestrator_pb.Notice.SEVERITY_WARNING, orchestrator_pb.Notice.SEVERITY_ERROR)


async def told(
    cluster: Cluster, job_id: str
) -> tuple[orchestrator_pb.Job, list[str], orchestrator_pb.StateChanged]:
    """Return the ended job, its warnings, and its last state in the log."""
    job = await cluster.wait(job_id)
    watch = cluster.api.WatchJob(orchestrator_pb.WatchJobRequest(job_id=job_id))
    events = [event async for event in watch]
    notices = [e.notice.text for e in events if e.notice.severity in WARNED]
    return job, notices, [e.state for e in events if e.HasField("state")][-1]


async def test_a_job_in_which_no_policy_was_updated_says_so(cluster: Cluster) -> None:
    cluster.trainers[0].script.skip = frozenset({0, 1})
    job, notices, ended = await told(cluster, await cluster.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert job.problem.kind == ended.problem.kind == "nothing_learned"
    assert "0 of 2 steps had a signal" in job.problem.message
    assert job.problem.remedy
    assert any("0 of 2 steps had a signal" in one for one in notices)


async def test_a_job_whose_advantages_are_always_zero_learned_nothing(cluster: Cluster) -> None:
    cluster.trainers[0].script.flat = {"solver": range(3), "checker": range(3)}
    job, notices, ended = await told(cluster, await cluster.submit(job_yaml(pipeline__steps=3)))
    # Its versions are published like any others.
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert job.versions == {"solver": 3, "checker": 3}
    assert job.problem.kind == ended.problem.kind == "nothing_learned"
    assert job.problem.value == "checker, solver"
    assert any("0 of 3 steps had a signal" in one for one in notices)
    assert (job.metrics["solver/signal_steps"], job.metrics["checker/signal_steps"]) == (0, 0)


async def test_the_one_policy_without_a_signal_is_named(cluster: Cluster) -> None:
    cluster.trainers[0].script.flat = {"solver": {1}, "checker": range(3)}
    job, notices, _ = await told(cluster, await cluster.submit(job_yaml(pipeline__steps=3)))
    assert not job.HasField("problem")
    assert [one for one in notices if "had a signal" in one] == [
        "0 of 3 steps had a signal for checker"
    ]
    assert (job.metrics["solver/signal_steps"], job.metrics["checker/signal_steps"]) == (2, 0)


@pytest.mark.parametrize("learns", [True, False])
async def test_steps_with_a_signal_are_counted_across_restarts_and_pauses(
    cluster: Cluster, learns: bool
) -> None:
    # Only a step before the restart has a signal, or none has.
    steps = range(1 if learns else 0, 9)
    cluster.trainers[0].script.flat = {"solver": steps, "checker": steps}
    text = job_yaml(pipeline__steps=9)
    job_id = await cluster.submit(text)
    await cluster.until(job_id, lambda job: job.step >= 2)
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    await cluster.until(job_id, lambda job: job.step >= 4)
    with suppress(FailedPrecondition):  # it may have ended by now
        await cluster.pause(job_id)
    job = await cluster.wait(job_id, (*ENDED, common_pb.JOB_STATE_PAUSED))
    if job.state == common_pb.JOB_STATE_PAUSED:
        await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert job.HasField("problem") is not learns
    assert job.metrics["solver/signal_steps"] == int(learns)


async def test_one_update_is_a_plain_success(cluster: Cluster) -> None:
    cluster.trainers[0].script.skip = frozenset({0})
    job, notices, ended = await told(cluster, await cluster.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert not job.HasField("problem")
    assert not ended.HasField("problem")
    assert not any("updated" in one for one in notices)


@pytest.mark.parametrize(("share", "plain"), [(1.0, False), (0.5, False), (0.0, True)])
async def test_trajectories_that_never_used_their_endpoint_are_reported(
    cluster: Cluster, share: float, plain: bool
) -> None:
    seen = 0

    def metrics(_: object) -> dict[str, float]:
        nonlocal seen
        seen += 1
        return {UNUSED_ENDPOINT: 1.0} if seen % 2 < 2 * share else {}

    cluster.rollouts[0].script.metrics = metrics
    job, notices, _ = await told(cluster, await cluster.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert job.HasField("problem") is not plain
    if not plain:
        assert job.problem.kind == "no_turns"
        assert f"{8 * share:.0f} of 8 trajectories" in job.problem.message
        assert "cache" in job.problem.remedy
        first = f"step 1: {4 * share:.0f} of 4 trajectories opened an endpoint"
        assert any(one.startswith(first) for one in notices)
        rows = (
            await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job.job_id))
        ).rows
        assert rows[0].values["trajectories/without_turns"] == 4 * share
    else:
        assert not any("endpoint" in one for one in notices)
