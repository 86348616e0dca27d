"""Jobs that run from their submission to their end."""

import json

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")


@pytest.mark.parametrize("mode", ["serial", "sync", "micro_batch", "async"])
async def test_a_job_runs_to_its_end(cluster: Cluster, mode: str) -> None:
    text = job_yaml(pipeline__mode=mode, evaluation__queries=3)
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert (job.step, job.total_steps) == (2, 2)
    assert dict(job.before) == {"reward/solver": 1.0, "team_success": 1.0}
    assert dict(job.after) == dict(job.before)
    await cluster.check_accounts(job_id, 2, POLICIES)
    asked = cluster.trainers[0].requests
    alpha = int(mode == "async")
    assert all(one.oldest_version == max(0, one.version - alpha) for one in asked)
    for name in ("reward/mean", "team/mean", "solver/loss/policy", "rollout/tokens_per_second"):
        assert name in job.metrics
    assert not [name for name in job.metrics if name.endswith("grad_norm")]  # it was NaN

    lines = (cluster.directory / job_id / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 2]
    states = [e.state.state for e in await cluster.events(job_id) if e.HasField("state")]
    assert states == [
        common_pb.JOB_STATE_SUBMITTED,
        common_pb.JOB_STATE_STARTING,
        common_pb.JOB_STATE_RUNNING,
        common_pb.JOB_STATE_SUCCEEDED,
    ]
    saved = await cluster.api.ListCheckpoints(orchestrator_pb.ListCheckpointsRequest(job_id=job_id))
    assert [(one.policy, one.version) for one in saved.checkpoints] == [
        ("checker", 2),
        ("solver", 2),
    ]
