"""Rows that an ended job keeps for a resume, and their end."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.rpc import FailedPrecondition, NotFound, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch


async def test_a_cancelled_job_is_forgotten(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    job_id = await cluster.submit(job_yaml(pipeline__steps=50))
    await cluster.until(job_id, lambda job: job.step >= 1)
    worker.script.seconds = 1000
    running = len(worker.ran)
    while len(worker.ran) == running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    forget = orch.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    with pytest.raises(FailedPrecondition, match="Cancel it first"):
        await cluster.api.ForgetJob(forget)
    await cluster.cancel(job_id)
    assert (await cluster.wait(job_id)).state == pb.JOB_STATE_CANCELLED
    tables = await cluster.api.DescribeTables(es.DescribeTablesRequest(job_id=job_id))
    assert {table.policy for table in tables.tables} == {"checker", "solver"}

    for _ in range(2):
        forget = orch.ForgetJobRequest(request_id=new_id(), job_id=job_id)
        assert (await cluster.api.ForgetJob(forget)).job.state == pb.JOB_STATE_CANCELLED
    with pytest.raises(NotFound, match="rows are freed"):
        await cluster.api.DescribeTables(es.DescribeTablesRequest(job_id=job_id))
    audit = await cluster.api.AuditJob(orch.AuditJobRequest(job_id=job_id))
    assert not audit.violations
    assert sum(one.trained for one in audit.tables.policies) > 0

    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == pb.JOB_STATE_FAILED
    assert job.problem.kind == "job_over"


async def test_a_job_that_never_had_rows_is_forgotten_too(cluster: Cluster) -> None:
    await cluster.trainers[0].down()
    job_id = await cluster.submit(job_yaml())
    await cluster.cancel(job_id)
    await cluster.wait(job_id)
    await cluster.api.ForgetJob(orch.ForgetJobRequest(request_id=new_id(), job_id=job_id))
