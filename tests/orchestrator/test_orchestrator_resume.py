"""Jobs that continue with another specification, and two orchestrators for one job."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")


async def test_a_job_may_go_on_for_longer(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    changed = job_yaml(pipeline__steps=4, pipeline__alpha=3, limits__turn_seconds=7)
    job = await cluster.resume(job_id, changed)
    assert job.total_steps == 4
    await cluster.resume(job_id, changed)  # repeated: the same
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 4, POLICIES)
    assert cluster.rollouts[0].specs[job_id].limits.turn_seconds == 7
    assert "steps: 4" in (cluster.directory / job_id / "job.yaml").read_text()
    notices = await cluster.notices(job_id)
    assert any("pipeline.steps: 2 -> 4" in text for text in notices)
    assert sum("pipeline.alpha = 3: without effect" in text for text in notices) == 1


async def test_settings_without_effect_are_noted_once_at_submit(cluster: Cluster) -> None:
    request = orchestrator_pb.SubmitJobRequest(
        request_id=new_id(), spec=job_yaml(pipeline__alpha=3)
    )
    job_id = (await cluster.api.SubmitJob(request)).job.job_id
    await cluster.api.SubmitJob(request)
    told = [text for text in await cluster.notices(job_id) if "without effect" in text]
    assert [text.partition(":")[0] for text in told] == ["pipeline.alpha = 3"]
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


async def test_another_job_is_refused_with_the_difference(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    with pytest.raises(FailedPrecondition) as refused:
        await cluster.resume(job_id, job_yaml(seed=7, pipeline__group_size=3, pipeline__steps=4))
    error = refused.value
    assert (error.kind, error.field, error.value) == (
        "spec_incompatible",
        "pipeline.group_size",
        "3",
    )
    assert "pipeline.group_size: 2 -> 3 (it decides which samples are in a step" in error.message
    assert "seed: 0 -> 7 (the order of tasks and all randomness follow from it)" in error.message
    assert f"init_from: {job_id}" in (error.remedy or "")
    with pytest.raises(InvalidArgument, match="policy"):
        await cluster.resume(job_id, job_yaml(agents__solver__policy="nobody"))
    # Nothing has changed: it waits, and can still continue unchanged.
    assert (await cluster.job(job_id)).state == common_pb.JOB_STATE_PAUSED
    await cluster.resume(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


async def test_a_running_job_keeps_its_specification(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.2
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id, (common_pb.JOB_STATE_RUNNING,))
    with pytest.raises(FailedPrecondition, match="cannot change now") as refused:
        await cluster.resume(job_id, job_yaml(pipeline__steps=4))
    assert (refused.value.kind, refused.value.field) == ("job_active", "spec")
    await cluster.resume(job_id, job_yaml())
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


def changes_of(job: orchestrator_pb.Job) -> list[tuple[int, dict[str, tuple[str, str]]]]:
    """The job's history: steps done, and old and new values by field."""
    return [
        (one.step, {part.field: (part.old, part.new) for part in one.fields}) for one in job.history
    ]


async def test_a_job_that_has_succeeded_goes_on_for_more_steps(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml(evaluation__queries=2, checkpoint__every=1))
    first = await cluster.wait(job_id)
    assert (first.state, first.step) == (common_pb.JOB_STATE_SUCCEEDED, 2)
    items = [(await cluster.step(job_id, step)).cursor for step in range(2)]
    job = await cluster.resume(job_id, overrides={"pipeline.steps": "4"})
    assert (job.state, job.step, job.total_steps) == (common_pb.JOB_STATE_SUBMITTED, 2, 4)
    assert first.after
    assert not job.after, "they are those of the last step"
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 4), job.problem
    assert job.ended_at.ToNanoseconds() > first.ended_at.ToNanoseconds()
    assert job.before == first.before
    assert job.after
    # Versions and the order of tasks go on where they were, and no step is made twice.
    await cluster.check_accounts(job_id, 4, POLICIES)
    items += [(await cluster.step(job_id, step)).cursor for step in range(2, 4)]
    assert items == [2, 4, 6, 8]
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    trained = [row.step for row in rows if "trajectories/completed" in row.values]
    assert trained == [1, 2, 3, 4]
    assert changes_of(job) == [(2, {"pipeline.steps": ("2", "4")})]


async def test_a_job_that_has_succeeded_needs_more_steps(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id)
    for overrides in ({}, {"pipeline.steps": "2"}, {"limits.turn_seconds": "7"}):
        with pytest.raises(FailedPrecondition, match="has done all of its 2 steps") as refused:
            await cluster.resume(job_id, overrides=overrides)
        assert (refused.value.kind, refused.value.field) == ("nothing_left", "pipeline.steps")
        assert f"troupe jobs resume {job_id} --set pipeline.steps=4" in (refused.value.remedy or "")
    job = await cluster.job(job_id)
    assert (job.state, list(job.history)) == (common_pb.JOB_STATE_SUCCEEDED, [])


async def test_rows_for_reuse_that_are_gone_refuse_more_steps(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml(pipeline__mode="async", pipeline__max_uses=2))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    with pytest.raises(FailedPrecondition, match="rows for reuse are gone") as refused:
        await cluster.resume(job_id, overrides={"pipeline.steps": "4"})
    assert refused.value.kind == "rows_gone"
    assert f"init_from: {job_id}" in (refused.value.remedy or "")


async def test_changes_of_every_resume_are_kept_in_order(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    rates = {"policies.solver.optimizer.lr": "3e-6", "agents.solver.sampling": "{temperature: 0.7}"}
    await cluster.resume(job_id, overrides=rates)
    await cluster.wait(job_id)
    job = await cluster.resume(job_id, overrides={"pipeline.steps": "3"})
    assert changes_of(job) == [
        (
            1,
            {
                "agents.solver.sampling.temperature": ("1.0", "0.7"),
                "policies.solver.optimizer.lr": ("1e-05", "3e-06"),
            },
        ),
        (2, {"pipeline.steps": ("2", "3")}),
    ]
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    spec = cluster.rollouts[0].specs[job_id]
    assert spec.agents["solver"].sampling.temperature == 0.7
    assert spec.policies["solver"].optimizer.lr == 3e-6
    notices = await cluster.notices(job_id)
    assert any("after step 1 with another specification: agents.solver" in one for one in notices)


async def test_an_orchestrator_that_dies_after_a_change_is_recorded_goes_on_under_it(
    cluster: Cluster,
) -> None:
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id)
    service = cluster.orchestrator.service  # type: ignore[union-attr]
    await service._at.jobs.stop()  # type: ignore[union-attr]  # it dies before it applies the change
    overrides = {"pipeline.steps": "4"}
    job = await cluster.resume(job_id, overrides=overrides)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUBMITTED, 2)
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    # A client whose first call got no answer calls again: the change counts once.
    assert len((await cluster.resume(job_id, overrides=overrides)).history) == 1
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 4), job.problem
    await cluster.check_accounts(job_id, 4, POLICIES)
    assert changes_of(job) == [(2, {"pipeline.steps": ("2", "4")})]


async def test_a_value_that_cannot_be_read_is_refused_by_its_field(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    for overrides, field in (
        ({"pipeline.steps": "{"}, "pipeline.steps"),
        ({"pipeline.steps": "many"}, "pipeline.steps"),
        ({"pipeline.stepps": "3"}, "pipeline.stepps"),
        ({"pipeline.steps.more": "3"}, "pipeline.steps.more"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await cluster.resume(job_id, overrides=overrides)
        assert (refused.value.field or "").startswith(field)
    assert (await cluster.job(job_id)).state == common_pb.JOB_STATE_PAUSED
