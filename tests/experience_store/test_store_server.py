"""The service over gRPC: what it refuses, how it says so, and a step from end to end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.chassis.server import serve
from services.chassis.settings import ServiceSettings
from services.experience_store.server import make_service
from tests.support.experience import make_sample
from troupe import tensors
from troupe.rpc import (
    ClientSettings,
    NotFound,
    connect,
    new_id,
)
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

Response = store_pb.ClaimMicroBatchResponse
TRAJECTORIES = [("q0", "q0-t0"), ("q0", "q0-t1")]


class Client:
    """Calls of one job, with fresh request ids."""

    def __init__(self, stub: store_grpc.ExperienceStoreAsyncStub) -> None:
        self.stub = stub
        self.job = new_id("job")

    async def create(self, policies: tuple[str, ...] = ("solver",), **fields: object) -> None:
        request = store_pb.CreateTablesRequest(
            request_id=new_id(), job_id=self.job, policies=policies, **fields
        )
        await self.stub.CreateTables(request)

    def open_request(self, **fields: object) -> store_pb.OpenStepRequest:
        values: dict[str, object] = {
            "versions": {"solver": 0},
            "query_ids": ["q0"],
            "group_size": 2,
        }
        return store_pb.OpenStepRequest(request_id=new_id(), job_id=self.job, **(values | fields))

    def append_request(
        self, query: str, trajectory: str, **fields: object
    ) -> store_pb.AppendTrajectoryRequest:
        values: dict[str, object] = {
            "state": pb.TRAJECTORY_STATE_COMPLETED,
            "samples": [make_sample(query, 0, trajectory)],
        }
        return store_pb.AppendTrajectoryRequest(
            request_id=new_id(),
            job_id=self.job,
            query_id=query,
            trajectory_id=trajectory,
            **(values | fields),
        )

    def claim_request(self, **fields: object) -> store_pb.ClaimMicroBatchRequest:
        values: dict[str, object] = {
            "policy": "solver",
            "claimant": "trainer",
            "max_samples": 8,
            "lease_seconds": 30,
        }
        return store_pb.ClaimMicroBatchRequest(
            request_id=new_id("claim"), job_id=self.job, **(values | fields)
        )

    def commit_request(self, *claims: str, **fields: object) -> store_pb.CommitStepRequest:
        values: dict[str, object] = {
            "policy": "solver",
            "claimant": "trainer",
            "claim_ids": claims,
            "outcome": store_pb.STEP_OUTCOME_APPLIED,
            "weights": pb.WeightsRef(job_id=self.job, policy="solver", version=1),
            "metrics": {"loss/policy": 0.25},
        }
        return store_pb.CommitStepRequest(
            request_id=new_id("commit"), job_id=self.job, **(values | fields)
        )


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    settings = ServiceSettings(redis_url=redis_url, drain_seconds=0.2, stream_drain_seconds=0)
    async with serve(make_service, settings) as server:
        channel = connect(server.address, ClientSettings())
        yield Client(store_grpc.ExperienceStoreStub(channel))
        await channel.close()


async def test_a_step_from_tables_to_commit(client: Client) -> None:
    await client.create()
    assert not (await client.stub.OpenStep(client.open_request())).existed
    for query, trajectory in TRAJECTORIES:
        request = client.append_request(query, trajectory)
        assert (await client.stub.AppendTrajectory(request)).accepted
        # The chassis remembers the request id: the same response again.
        assert (await client.stub.AppendTrajectory(request)).accepted

    claim = await client.stub.ClaimMicroBatch(client.claim_request())
    assert claim.outcome == Response.OUTCOME_CLAIMED
    row = claim.samples[0].sample
    assert row.sample_id == "q0_0_q0-t0"
    assert row.reward == 1.0
    assert tensors.from_proto(row.prompt_ids).tolist() == [0, 0, 0, 0]
    assert list(claim.samples[0].group_rewards) == [1.0, 1.0]

    response = await client.stub.CommitStep(client.commit_request(claim.claim_id))
    assert not response.existed
    again = await client.stub.CommitStep(client.commit_request(claim.claim_id))
    assert again.existed
    assert again.commit == response.commit

    step = await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    assert step.sealed
    assert step.commits == [response.commit]
    assert sorted(step.ended_trajectory_ids) == ["q0-t0", "q0-t1"]
    assert step.counts[0].trained == 2
    reopened = await client.stub.OpenStep(client.open_request())
    assert reopened.existed
    assert sorted(reopened.ended_trajectory_ids) == ["q0-t0", "q0-t1"]

    await client.stub.DropTables(store_pb.DropTablesRequest(request_id=new_id(), job_id=client.job))
    with pytest.raises(NotFound):
        await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
