"""Engines are told of a step's weights before their commit, and what becomes of them."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import TrainerScript
from tests.support.waiting import until
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb


async def finish(cluster: Cluster, job_id: str) -> None:
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem


@pytest.mark.parametrize("mode", ["serial", "sync", "micro_batch"])
@pytest.mark.parametrize("fails", [False, True])
async def test_rollout_workers_load_each_version_before_its_commit_where_steps_do_not_overlap(
    cluster: Cluster, mode: str, fails: bool
) -> None:
    rollout = cluster.rollouts[0]
    cluster.trainers[0].script = TrainerScript(announce_seconds=0.3)
    rollout.script.ahead_error = FailedPrecondition("they have other work") if fails else None
    job_id = await cluster.submit(job_yaml(policies=["solver"], pipeline__mode=mode))
    await finish(cluster, job_id)
    assert rollout.loads == [
        (when, "solver", version) for version in (1, 2) for when in ("ahead", "update")
    ]


async def test_where_steps_overlap_engines_serve_the_former_version_until_the_commit(
    cluster: Cluster,
) -> None:
    rollout = cluster.rollouts[0]
    cluster.trainers[0].script = TrainerScript(announce_seconds=0.1)
    job_id = await cluster.submit(job_yaml(policies=["solver"], pipeline__mode="async"))
    await finish(cluster, job_id)
    assert rollout.loads == [("update", "solver", 1), ("update", "solver", 2)]


async def test_engines_go_back_when_it_is_unknown_whether_a_step_will_be_committed(
    cluster: Cluster,
) -> None:
    """The trainer, or the way to it, was lost between the step and its commit."""
    rollout = cluster.rollouts[0]
    cluster.trainers[0].script = TrainerScript(announce_seconds=1.0, break_announced=True)
    job_id = await cluster.submit(job_yaml(policies=["solver"], pipeline__mode="sync"))
    await finish(cluster, job_id)
    first = [load for load in rollout.loads if load[2] < 2]
    assert first[:2] == [("ahead", "solver", 1), ("update", "solver", 0)]
    # The step went on: it is loaded again, or once it is committed.
    assert first[-1] == ("update", "solver", 1)
    await cluster.check_accounts(job_id, 2, ["solver"])


async def test_an_orchestrator_that_dies_before_the_commit_says_what_was_committed(
    cluster: Cluster,
) -> None:
    rollout = cluster.rollouts[0]
    cluster.trainers[0].script = TrainerScript(announce_seconds=1.0)
    job_id = await cluster.submit(job_yaml(policies=["solver"], pipeline__mode="sync"))
    await until(lambda: rollout.loads)
    await cluster.stop_orchestrator()
    prepared = rollout.calls["PrepareJob"]
    await cluster.start_orchestrator()
    await finish(cluster, job_id)
    # The new one prepares the job again, which names the committed version.
    assert rollout.calls["PrepareJob"] > prepared
    await cluster.check_accounts(job_id, 2, ["solver"])
