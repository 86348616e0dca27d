"""The part of the orchestrator double that answers for the experience store."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from troupe import tensors
from troupe.rpc import NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

PAGE = 2


def sample(number: int) -> store_pb.Sample:
    """Even ones are trained and freed, odd ones ready with their payload."""
    row = store_pb.Sample(
        sample_id=f"q{number}_0_t0",
        policy="solver",
        query_id=f"q{number}",
        trajectory_id="t0",
        agent="solver",
        group_id=f"q{number}/solver",
        reward=number / 4,
        state=common_pb.SAMPLE_STATE_TRAINED,
        uses=1,
    )
    if number % 2:
        row.state, row.uses = common_pb.SAMPLE_STATE_READY, 0
        row.prompt_ids.CopyFrom(tensors.to_proto(np.array([1, 2, 3], np.int32)))
        row.response_ids.CopyFrom(tensors.to_proto(np.array([4, 5], np.int32)))
        row.logprobs.CopyFrom(tensors.to_proto(np.array([-0.5, -0.25], np.float32)))
        row.versions.add(version=7, start=0, end=2)
        row.columns["hint"].json = '{"a": 1}'
        row.columns["values"].tensor.CopyFrom(tensors.to_proto(np.array([0.5], np.float32)))
        content = hashlib.sha256(b"seen").digest()
        row.payloads.add(kind="image", media_type="image/png", digest=content, position=1, tokens=2)
        row.payloads[0].data = b"seen"
    return row


class FakeTables:
    """Five samples of `solver`, two a page; an audit that a test can spoil."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.freed = False

    async def ListSamples(
        self, request: store_pb.ListSamplesRequest, context: Any
    ) -> store_pb.ListSamplesResponse:
        await self._note("ListSamples", request, context)
        wanted = request.state if request.HasField("state") else None
        rows = [row for row in map(sample, range(5)) if wanted in (None, row.state)]
        first = int(request.page_token or 0)
        size = request.page_size or PAGE
        more = first + size < len(rows)
        return store_pb.ListSamplesResponse(
            samples=rows[first : first + size], next_page_token=str(first + size) if more else ""
        )

    async def DescribeTables(
        self, request: store_pb.DescribeTablesRequest, context: Any
    ) -> store_pb.DescribeTablesResponse:
        await self._note("DescribeTables", request, context)
        if self.freed:
            remedy = "`troupe jobs audit` shows their fate."
            await self._fail(context, NotFound("its rows are freed", remedy=remedy))
        reply = store_pb.DescribeTablesResponse(
            payload_bytes=3 << 20, high_water_bytes=4 << 20, redis_bytes=5 << 20
        )
        reply.tables.add(
            policy="solver",
            version=3,
            committed_step=2,
            newest_step=4,
            pending=1,
            ready=2,
            trained=1234,
            dropped=5,
            drop_reasons={"workflow_raised": 5},
            oldest_pending_seconds=61,
            oldest_pending_sample="q9_0_t0",
            payload_bytes=3 << 20,
        )
        return reply

    async def AuditJob(
        self, request: orchestrator_pb.AuditJobRequest, context: Any
    ) -> orchestrator_pb.AuditJobResponse:
        await self._note("AuditJob", request, context)
        reply = orchestrator_pb.AuditJobResponse(violations=self.violations)
        reply.tables.steps, reply.tables.trajectories_admitted = 3, 24
        reply.tables.trajectories_ended = 24
        reply.tables.trajectories_by_state.update({"completed": 23, "failed": 1})
        reply.tables.policies.add(
            policy="solver",
            appended=46,
            trained=44,
            dropped=2,
            drop_reasons={"workflow_raised": 2},
            steps_applied=3,
            version=3,
            lost=len(self.violations),
        )
        weights = common_pb.WeightsRef(policy="solver", version=3, checksum="abc")
        reply.versions.add(weights=weights, step=3)
        return reply

    async def ForgetJob(
        self, request: orchestrator_pb.ForgetJobRequest, context: Any
    ) -> orchestrator_pb.ForgetJobResponse:
        await self._note("ForgetJob", request, context)
        return orchestrator_pb.ForgetJobResponse(job=await self._job(request.job_id, context))

    async def _job(self, job_id: str, context: Any) -> orchestrator_pb.Job:
        raise NotImplementedError

    async def _note(self, method: str, request: Any, context: Any) -> None:
        raise NotImplementedError
