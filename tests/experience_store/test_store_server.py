"""The service over gRPC, from end to end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.experience_store.samples import FILL_BATCH
from tests.support.experience import make_sample
from tests.support.experience_client import Client
from tests.support.waiting import PATIENCE, until
from troupe import tensors
from troupe.rpc import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    new_id,
)
from troupe.v1 import common_pb2 as common_pb
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

    async def answered() -> bool:
        try:
            response = await client.stub.ClaimMicroBatch(
                client.claim_request(wait_seconds=300), timeout=1.5
            )
        except DeadlineExceeded:
            return False  # the machine was busy for longer than the margin of the answer
        assert response.outcome == Response.OUTCOME_WAIT
        return True

    await until(answered)


async def test_late_columns_are_filled_watched_and_listed(client: Client) -> None:
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
    assert filled.state == common_pb.SAMPLE_STATE_READY
    async with asyncio.timeout(PATIENCE):
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


async def test_a_claim_that_got_nothing_may_be_repeated_under_its_id(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    request = client.claim_request()
    assert (await client.stub.ClaimMicroBatch(request)).outcome == Response.OUTCOME_WAIT
    for query, trajectory in TRAJECTORIES:
        await client.stub.AppendTrajectory(client.append_request(query, trajectory))
    first = await client.stub.ClaimMicroBatch(request)
    assert len(first.samples) == 2
    assert await client.stub.ClaimMicroBatch(request) == first


async def test_a_claim_repeated_while_it_waits_may_know_other_claims(client: Client) -> None:
    """A suspended step's claim still waits; the resumed step repeats it without known claims."""
    await client.create()
    await client.stub.OpenStep(client.open_request())
    request = client.claim_request(wait_seconds=60, known_claims=["c0"])
    waiting = asyncio.ensure_future(client.stub.ClaimMicroBatch(request))
    await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    del request.known_claims[:]
    repeated = asyncio.ensure_future(client.stub.ClaimMicroBatch(request))
    for query, trajectory in TRAJECTORIES:
        await client.stub.AppendTrajectory(client.append_request(query, trajectory))
    async with asyncio.timeout(PATIENCE):
        first, second = await asyncio.gather(waiting, repeated)
    assert len(second.samples) == 2
    assert [row.sample for row in first.samples] == [row.sample for row in second.samples]
    step = await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    assert step.counts[0].claimed == 2


async def test_a_waiting_claim_whose_caller_leaves_leases_nothing(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    waiting = asyncio.ensure_future(
        client.stub.ClaimMicroBatch(client.claim_request(wait_seconds=60))
    )
    await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for query, trajectory in TRAJECTORIES:
        await client.stub.AppendTrajectory(client.append_request(query, trajectory))
    other = client.claim_request()
    other.claimant = "other"
    assert len((await client.stub.ClaimMicroBatch(other)).samples) == 2


async def test_columns_that_come_before_their_row_are_to_be_sent_again(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())

    def fill() -> store_pb.FillColumnsRequest:
        return store_pb.FillColumnsRequest(
            request_id=new_id(),
            job_id=client.job,
            policy="solver",
            sample_id="q0_0_q0-t0",
            reward=0.5,
        )

    with pytest.raises(NotFound) as error:
        await client.stub.FillColumns(fill())
    assert error.value.kind == "sample_not_found"
    assert "AppendTrajectory" in str(error.value.remedy)
    row = make_sample("q0", 0, "q0-t0", reward=None)
    await client.stub.AppendTrajectory(client.append_request("q0", "q0-t0", samples=[row]))
    filled = await client.stub.FillColumns(fill())
    assert filled.accepted
    assert filled.state == common_pb.SAMPLE_STATE_PENDING, "its group is not complete"


async def test_a_roster_is_amended_over_grpc(client: Client) -> None:
    await client.create()
    opened = client.open_request(query_ids=["q0", "q1"], held_open=True, cursor=2)
    await client.stub.OpenStep(opened)
    watching = client.stub.WatchTables(store_pb.WatchTablesRequest(job_id=client.job))
    for query, trajectory in TRAJECTORIES:
        response = await client.stub.AppendTrajectory(client.append_request(query, trajectory))
        assert (response.accepted, response.step) == (True, 0)

    def amend(**fields: Any) -> store_pb.AmendStepRequest:
        return store_pb.AmendStepRequest(request_id=new_id(), job_id=client.job, **fields)

    await client.stub.AmendStep(amend(add_query_ids=["q2"], cursor=3))
    later = client.open_request(step=1, query_ids=["q3"], held_open=True)
    await client.stub.OpenStep(later)
    request = amend(
        drop_query_ids=["q0", "q1"],
        drop_reason="surplus: 1 of 2",
        carry_query_ids=["q2"],
        carry_to=1,
        close=True,
    )
    for _ in range(2):
        response = await client.stub.AmendStep(request)
        assert list(response.complete_query_ids) == ["q0"]
    about = store_pb.GetStepRequest(job_id=client.job, step=0, counts_only=True, with_queries=True)
    step = await client.stub.GetStep(about)
    assert (step.open, step.closed, step.sealed) == (True, True, True)
    assert (step.group_size, step.cursor, step.trajectories_ended) == (2, 3, 4)
    assert list(step.query_ids) == ["q0"]
    assert step.ended_trajectory_ids == []
    kept = store_pb.QueryStatus(
        query_id="q0", trajectories_ended=2, complete=True, samples=2, kept=2
    )
    assert list(step.queries) == [kept]
    late = await client.stub.AppendTrajectory(client.append_request("q1", "q1-t0"))
    assert not late.accepted
    moved = await client.stub.AppendTrajectory(client.append_request("q2", "q2-t0"))
    assert (moved.accepted, moved.step) == (True, 1)
    async with asyncio.timeout(PATIENCE):
        async for status in watching:
            if (status.step, status.closed) == (0, True) and status.sealed:
                break
    assert status.queries_complete == 1
    watching.cancel()
    with pytest.raises(FailedPrecondition) as error:
        await client.stub.AmendStep(amend(add_query_ids=["q9"]))
    assert (error.value.kind, error.value.field) == ("step_closed", "step")
    absent = await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=9))
    assert not absent.closed


async def test_the_rewards_of_a_trajectory_come_in_one_call(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request(group_size=1))
    rows = [make_sample("q0", turn, "q0-t0", reward=None) for turn in range(3)]
    await client.stub.AppendTrajectory(client.append_request("q0", "q0-t0", samples=rows))

    def fill(*rewards: tuple[str, float]) -> store_pb.FillColumnsRequest:
        (sample, reward), *more = rewards
        return store_pb.FillColumnsRequest(
            request_id=new_id(),
            job_id=client.job,
            policy="solver",
            sample_id=sample,
            reward=reward,
            more=[store_pb.SampleColumns(sample_id=name, reward=value) for name, value in more],
        )

    with pytest.raises(NotFound) as error:
        await client.stub.FillColumns(fill(("q0_0_q0-t0", 0.5), ("none", 1.0), ("q0_1_q0-t0", 1.5)))
    assert error.value.value == "none"
    filled = await client.stub.FillColumns(
        fill(("q0_0_q0-t0", 9.0), ("q0_1_q0-t0", 9.0), ("q0_2_q0-t0", 2.5))
    )
    assert not filled.accepted, "the others were filled though one was unknown"
    assert [(one.accepted, one.state) for one in filled.more] == [
        (False, common_pb.SAMPLE_STATE_PENDING),
        (True, common_pb.SAMPLE_STATE_READY),
    ]
    claim = await client.stub.ClaimMicroBatch(client.claim_request())
    assert [item.sample.reward for item in claim.samples] == [0.5, 1.5, 2.5]


async def test_more_rewards_than_one_script_fills_come_in_one_call(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request(group_size=1))
    rows = [make_sample("q0", turn, "q0-t0", reward=None) for turn in range(FILL_BATCH + 3)]
    await client.stub.AppendTrajectory(client.append_request("q0", "q0-t0", samples=rows))
    first, *more = [row.sample_id for row in rows]
    filled = await client.stub.FillColumns(
        store_pb.FillColumnsRequest(
            request_id=new_id(),
            job_id=client.job,
            policy="solver",
            sample_id=first,
            drop_reason="reward_timeout: 30 s",
            more=[store_pb.SampleColumns(sample_id=n, reward=i) for i, n in enumerate(more)],
        )
    )
    assert (filled.accepted, filled.state) == (True, common_pb.SAMPLE_STATE_DROPPED)
    # They are one group, which the last of them completed.
    states = [common_pb.SAMPLE_STATE_PENDING] * (FILL_BATCH - 1) + [
        common_pb.SAMPLE_STATE_READY
    ] * 3
    assert [(one.accepted, one.state) for one in filled.more] == [(True, s) for s in states]
    claim = await client.stub.ClaimMicroBatch(client.claim_request(max_samples=len(more)))
    rewards = {item.sample.sample_id: item.sample.reward for item in claim.samples}
    assert rewards == {name: float(turn) for turn, name in enumerate(more)}


async def test_a_repeated_append_is_recognised_by_its_ending(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request(group_size=1))
    request = client.append_request("q0", "q0-t0", samples=[make_sample("q0", 0, "q0-t0")])
    assert (await client.stub.AppendTrajectory(request)).accepted
    request.samples[0].reward = 99.0
    assert (await client.stub.AppendTrajectory(request)).accepted
    claim = await client.stub.ClaimMicroBatch(client.claim_request())
    assert [item.sample.reward for item in claim.samples] != [99.0], "the first rows stay"
    del request.samples[:]
    with pytest.raises(AlreadyExists) as error:
        await client.stub.AppendTrajectory(request)
    assert error.value.kind == "request_id_reused"
