"""The service over gRPC, from end to end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.support.experience import make_sample
from tests.support.experience_client import Client
from troupe import tensors
from troupe.rpc import (
    AlreadyExists,
    NotFound,
    new_id,
)
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

Response = store_pb.ClaimMicroBatchResponse
TRAJECTORIES = [("q0", "q0-t0"), ("q0", "q0-t1")]


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


async def test_a_request_id_with_other_contents_is_refused(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    first = client.append_request("q0", "q0-t0")
    other = client.append_request("q0", "q0-t1")
    other.request_id = first.request_id
    await client.stub.AppendTrajectory(first)
    with pytest.raises(AlreadyExists):
        await client.stub.AppendTrajectory(other)


async def test_a_claim_that_waits_answers_before_the_deadline_of_the_call(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    response = await client.stub.ClaimMicroBatch(
        client.claim_request(wait_seconds=300), timeout=1.5
    )
    assert response.outcome == Response.OUTCOME_WAIT


async def test_late_columns_watching_and_listing(client: Client) -> None:
    await client.create(required_columns=["ref_logprobs"])
    await client.stub.OpenStep(client.open_request())
    watching = client.stub.WatchTables(store_pb.WatchTablesRequest(job_id=client.job))
    for query, trajectory in TRAJECTORIES:
        await client.stub.AppendTrajectory(
            client.append_request(
                query, trajectory, samples=[make_sample(query, 0, trajectory, reward=None)]
            )
        )
    column = store_pb.Column(tensor=tensors.to_proto(np.ones(4, np.float32)))
    for _, trajectory in TRAJECTORIES:
        filled = await client.stub.FillColumns(
            store_pb.FillColumnsRequest(
                request_id=new_id(),
                job_id=client.job,
                policy="solver",
                sample_id=f"q0_0_{trajectory}",
                reward=0.5,
                columns={"ref_logprobs": column},
            )
        )
        assert filled.accepted
    assert filled.state == pb.SAMPLE_STATE_READY
    async with asyncio.timeout(20):
        async for status in watching:
            if status.sealed and status.counts[0].ready == 2:
                break
    watching.cancel()
    page = await client.stub.ListSamples(
        store_pb.ListSamplesRequest(job_id=client.job, policy="solver", page_size=1)
    )
    assert [row.sample_id for row in page.samples] == ["q0_0_q0-t0"]
    assert page.samples[0].reward == 0.5
    rest = await client.stub.ListSamples(
        store_pb.ListSamplesRequest(
            job_id=client.job, policy="solver", page_size=1, page_token=page.next_page_token
        )
    )
    assert [row.sample_id for row in rest.samples] == ["q0_0_q0-t1"]


async def test_watching_tables_that_do_not_exist_is_not_found(client: Client) -> None:
    watching = client.stub.WatchTables(store_pb.WatchTablesRequest(job_id=client.job))
    with pytest.raises(NotFound):
        await anext(aiter(watching))
