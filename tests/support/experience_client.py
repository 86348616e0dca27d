"""Calls of one job to an experience store over gRPC, right unless a test wants them wrong."""

from __future__ import annotations

from typing import Any

import grpc

from tests.support.experience import make_sample
from tests.support.waiting import PATIENCE
from troupe.experience import ExperienceWriter
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc


class Client:
    """Calls of one job, with fresh request ids."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = store_grpc.ExperienceStoreStub(channel)
        self.writer = ExperienceWriter(channel)
        self.job = new_id("job")

    async def create(self, policies: tuple[str, ...] = ("solver",), **fields: Any) -> None:
        request = store_pb.CreateTablesRequest(
            request_id=new_id(), job_id=self.job, policies=policies, **fields
        )
        await self.stub.CreateTables(request)
        for policy in policies:
            await self.stub.OpenVersion(
                store_pb.OpenVersionRequest(
                    request_id=new_id(),
                    job_id=self.job,
                    weights=common_pb.WeightsRef(job_id=self.job, policy=policy),
                )
            )

    def open_request(self, **fields: Any) -> store_pb.OpenStepRequest:
        values: dict[str, Any] = {
            "versions": {"solver": 0},
            "query_ids": ["q0"],
            "group_size": 2,
        }
        return store_pb.OpenStepRequest(request_id=new_id(), job_id=self.job, **(values | fields))

    def append_request(
        self, query: str, trajectory: str, **fields: Any
    ) -> store_pb.AppendTrajectoryRequest:
        values: dict[str, Any] = {
            "state": common_pb.TRAJECTORY_STATE_COMPLETED,
            "samples": [make_sample(query, 0, trajectory)],
            "query_id": query,
            "trajectory_id": trajectory,
        }
        return store_pb.AppendTrajectoryRequest(
            request_id=new_id(), job_id=self.job, **(values | fields)
        )

    def claim_request(self, **fields: Any) -> store_pb.ClaimMicroBatchRequest:
        values: dict[str, Any] = {
            "policy": "solver",
            "claimant": "trainer",
            "max_samples": 8,
            "lease_seconds": PATIENCE,
        }
        return store_pb.ClaimMicroBatchRequest(
            request_id=new_id("claim"), job_id=self.job, **(values | fields)
        )

    def commit_request(self, *claims: str, **fields: Any) -> store_pb.CommitStepRequest:
        values: dict[str, Any] = {
            "policy": "solver",
            "claimant": "trainer",
            "claim_ids": claims,
            "outcome": store_pb.STEP_OUTCOME_APPLIED,
            "weights": common_pb.WeightsRef(job_id=self.job, policy="solver", version=1),
            "metrics": {"loss/policy": 0.25},
        }
        return store_pb.CommitStepRequest(
            request_id=new_id("commit"), job_id=self.job, **(values | fields)
        )
