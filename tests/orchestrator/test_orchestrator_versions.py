"""Versions belong to the store; the orchestrator reads them, and notices when some are lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.weight_versions import WeightVersions, check_kept
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import weights_of
from tests.support.waiting import PATIENCE
from troupe.job import parse_job
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")


async def versions(cluster: Cluster, job_id: str, policy: str) -> list[tuple[int, int]]:
    request = orchestrator_pb.ListVersionsRequest(job_id=job_id, policy=policy)
    found = (await cluster.api.ListVersions(request)).versions
    return [(one.step, one.weights.version) for one in found]


async def forget_in_store(cluster: Cluster, pattern: str) -> None:
    """Delete keys of the store, as if its Redis had lost them."""
    async with redis.asyncio.from_url(cluster.settings.redis_url) as client:
        keys = [key async for key in client.scan_iter(pattern)]
        assert keys
        await client.delete(*keys)


@pytest.mark.parametrize("adopted", [False, True])
async def test_a_commit_that_the_orchestrator_dies_before_adopting_is_found_in_the_store(
    cluster: Cluster, adopted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()
    adopt = WeightVersions.adopt

    async def stay(self: WeightVersions, *args: Any) -> None:
        if adopted:
            await adopt(self, *args)
        stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(WeightVersions, "adopt", stay)
    job_id = await cluster.submit(job_yaml())
    async with asyncio.timeout(PATIENCE):
        await stuck.wait()
    await cluster.stop_orchestrator()
    monkeypatch.setattr(WeightVersions, "adopt", adopt)
    await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 2, POLICIES)
    for policy in POLICIES:
        assert await versions(cluster, job_id, policy) == [(0, 0), (1, 1), (2, 2)]
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    assert not audit.violations
    assert {one.weights.policy: one.weights.version for one in audit.versions} == dict.fromkeys(
        POLICIES, 2
    )


async def test_a_job_whose_versions_the_store_has_lost_fails_and_says_so(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    await cluster.stop_store()
    await forget_in_store(cluster, f"troupe:{{{job_id}*")
    await cluster.start_store()
    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert (job.state, job.problem.kind) == (common_pb.JOB_STATE_FAILED, "versions_lost")
    assert job.problem.field == "policies.checker"
    assert "has no version of policy checker" in job.problem.message
    assert "was at version 1 after 1 steps" in job.problem.message
    assert "checkpoints" in job.problem.remedy
    # It got no new tables, which would look as if it had just begun.
    with pytest.raises(Exception, match="has no tables"):
        await cluster.step(job_id, 0)
    assert dict(job.versions) == dict.fromkeys(POLICIES, 1), "what it had reached is shown still"


async def test_a_list_of_jobs_shows_versions_while_the_store_is_away(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    await cluster.stop_store()
    found = (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
    assert {one.job_id: dict(one.versions) for one in found} == {job_id: dict.fromkeys(POLICIES, 1)}
    await cluster.start_store()
    await cluster.resume(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


def entry(policy: str, version: int, step: int) -> store_pb.PolicyVersion:
    return store_pb.PolicyVersion(weights=weights_of("job", policy, version), step=step)


@pytest.mark.parametrize(
    ("seen", "step", "found", "lost"),
    [
        ({}, 0, {}, None),
        ({}, 0, {"solver": (0, 0)}, None),
        ({"solver": 0, "checker": 0}, 0, {"solver": (0, 0), "checker": (3, 3)}, None),
        # The store may be ahead, by an unreported commit.
        ({"solver": 1, "checker": 1}, 1, {"solver": (2, 2), "checker": (1, 1)}, None),
        # Steps that were skipped count, and restarts do not.
        ({"solver": 0, "checker": 3}, 2, {"solver": (0, 2), "checker": (3, 2)}, None),
        ({"solver": 0, "checker": 0}, 0, {"solver": (0, 0)}, "checker"),
        ({"solver": 2, "checker": 1}, 1, {"solver": (1, 1), "checker": (1, 1)}, "solver"),
        ({"solver": 1, "checker": 1}, 2, {"solver": (1, 2), "checker": (1, 1)}, "checker"),
        # A job of a release whose versions the store did not have.
        ({}, 1, {}, "checker"),
    ],
)
def test_a_store_that_has_less_than_the_job_has_seen_is_noticed(
    seen: dict[str, int], step: int, found: dict[str, tuple[int, int]], lost: str | None
) -> None:
    record = JobRecord(
        job_id="job",
        request_id="r",
        spec_json=parse_job(job_yaml()).model_dump_json(),
        directory=Path("somewhere"),
        created_at=0.0,
    )
    record = replace(record, step=step, versions=seen)
    stored = {policy: entry(policy, *numbers) for policy, numbers in found.items()}
    if lost is None:
        check_kept(record, stored)
        return
    with pytest.raises(FailedPrecondition) as error:
        check_kept(record, stored)
    assert (error.value.kind, error.value.field) == ("versions_lost", f"policies.{lost}")
