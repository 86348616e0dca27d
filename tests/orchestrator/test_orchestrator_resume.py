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
    assert "pipeline.group_size: 2 -> 3; seed: 0 -> 7" in error.message
    assert error.remedy
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
