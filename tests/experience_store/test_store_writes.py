"""Endings and late columns that share a call are accepted or refused separately."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.experience_store.server import WriteBatch
from tests.support.experience import make_sample
from tests.support.experience_client import Client
from troupe.experience import ExperienceWriter
from troupe.rpc import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
    new_id,
    to_status,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

Answer = Callable[[store_pb.WriteRequest], store_pb.WriteResponse]


def ending(name: str = "t", size: int = 0) -> store_pb.AppendTrajectoryRequest:
    return store_pb.AppendTrajectoryRequest(
        request_id=f"append-{name}", trajectory_id=name, reason="x" * size
    )


def taken(request: store_pb.WriteRequest) -> store_pb.WriteResponse:
    """Accept every ending in the step of its length; every fill finds its sample READY."""
    return store_pb.WriteResponse(
        endings=[
            store_pb.EndingWritten(
                response=store_pb.AppendTrajectoryResponse(accepted=True, step=len(part.reason))
            )
            for part in request.endings
        ],
        fills=[
            store_pb.FillWritten(
                response=store_pb.FillColumnsResponse(
                    state=common_pb.SAMPLE_STATE_READY, accepted=True
                )
            )
            for _ in request.fills
        ],
    )


class Line:
    """A stand-in for a channel to the store; the test ends its calls."""

    def __init__(self, answer: Answer = taken) -> None:
        self.answer = answer
        self.sent: list[store_pb.WriteRequest] = []
        self.open = asyncio.Event()
        self.open.set()

    def unary_unary(self, method: str, request_serializer: Any, **_: Any) -> Any:
        async def call(body: Any, timeout: float) -> store_pb.WriteResponse:
            self.sent.append(store_pb.WriteRequest.FromString(request_serializer(body)))
            answered = self.sent[-1]
            await asyncio.wait_for(self.open.wait(), timeout)
            return self.answer(answered)

        return call


def _writer(line: Line, retry: RetryPolicy | None = None) -> ExperienceWriter:
    return ExperienceWriter(line, retry)  # type: ignore[arg-type]


async def test_parts_that_arrive_while_calls_are_in_flight_share_the_next_call() -> None:
    line = Line()
    line.open.clear()
    writer = _writer(line)
    writes = []
    for number in range(2):
        writes.append(asyncio.create_task(writer.append(ending(f"first{number}", number), 30)))
        while len(line.sent) <= number:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert [len(call.endings) for call in line.sent] == [1, 1]
    writes += [
        asyncio.create_task(writer.append(ending(f"t{number}", number), 30)) for number in range(9)
    ]
    fills = [
        asyncio.create_task(writer.fill(store_pb.FillColumnsRequest(request_id=f"f{number}"), 30))
        for number in range(3)
    ]
    line.open.set()
    answers = await asyncio.gather(*writes)
    assert [answer.step for answer in answers] == [0, 1, *range(9)], "each has its own answer"
    assert all(
        filled.state == common_pb.SAMPLE_STATE_READY for filled in await asyncio.gather(*fills)
    )
    assert [(len(call.endings), len(call.fills)) for call in line.sent[2:]] == [(9, 3)]
    assert len({call.request_id for call in line.sent}) == 3


async def test_a_call_grows_no_larger_than_its_bound_unless_one_part_is() -> None:
    line = Line()
    writer = _writer(line)
    sizes = [3 << 19, 3 << 19, 9 << 19, 100, 100]
    answers = await asyncio.gather(
        *(writer.append(ending(f"t{number}", size), 30) for number, size in enumerate(sizes))
    )
    assert [answer.step for answer in answers] == sizes
    assert [len(call.endings) for call in line.sent] == [1, 1, 1, 2]


async def test_columns_do_not_wait_for_the_rows_of_others_nor_rows_for_columns() -> None:
    line = Line()
    line.open.clear()
    writer = _writer(line)
    sizes = [1, 1, *[3 << 19] * 3]
    writes = []
    for number, size in enumerate(sizes):
        writes.append(asyncio.create_task(writer.append(ending(f"t{number}", size), 30)))
        await asyncio.sleep(0.01)
    fill = store_pb.FillColumnsRequest(request_id="f", drop_reason="x" * (3 << 19))
    fills = [asyncio.create_task(writer.fill(fill, 30)) for _ in range(2)]
    await asyncio.sleep(0.01)
    line.open.set()
    await asyncio.gather(*writes, *fills)
    carried = [(len(call.fills), len(call.endings)) for call in line.sent]
    assert carried == [(0, 1), (0, 1), (1, 1), (1, 1), (0, 1)]


async def test_a_cancelled_part_is_not_sent_and_disturbs_no_other() -> None:
    line = Line()
    line.open.clear()
    writer = _writer(line)
    gone = asyncio.create_task(writer.append(ending("gone"), 30))
    stays = asyncio.create_task(writer.append(ending("stays", 5), 30))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0.01)
    line.open.set()
    assert (await stays).step == 5
    assert gone.cancelled()
    late = [part.trajectory_id for call in line.sent for part in call.endings]
    assert late.count("stays") == 1


async def test_a_part_that_is_refused_for_now_comes_again_alone() -> None:
    full = ResourceExhausted("full", kind="store_full", retry_after_ms=1)
    refused = ["t1", "t1"]

    def answer(request: store_pb.WriteRequest) -> store_pb.WriteResponse:
        response = taken(request)
        for part, written in zip(request.endings, response.endings, strict=True):
            if part.trajectory_id in refused:
                refused.remove(part.trajectory_id)
                written.error = to_status(full).SerializeToString()
        return response

    line = Line(answer)
    writer = _writer(line, RetryPolicy(max_attempts=3))
    answers = await asyncio.gather(*(writer.append(ending(f"t{n}", n), 30) for n in range(3)))
    assert [answer.step for answer in answers] == [0, 1, 2]
    names = [[part.trajectory_id for part in call.endings] for call in line.sent]
    assert names == [["t0", "t1", "t2"], ["t1"], ["t1"]]
    refused += ["t1"] * 3
    with pytest.raises(ResourceExhausted, match="full") as error:
        await writer.append(ending("t1"), 30)
    assert (error.value.kind, error.value.retry_after_ms) == ("store_full", 1)


async def test_a_failed_call_fails_exactly_the_parts_that_it_carried() -> None:
    failures = [Unavailable("nobody there")]

    def answer(request: store_pb.WriteRequest) -> store_pb.WriteResponse:
        if failures:
            raise failures.pop()
        return taken(request)

    line = Line(answer)
    writer = _writer(line)
    found = await asyncio.gather(
        *(writer.append(ending(f"t{n}"), 30) for n in range(2)), return_exceptions=True
    )
    # The channel has already repeated it if that can help.
    assert [type(one) for one in found] == [Unavailable, Unavailable]
    assert found[0] is not found[1]
    assert len(line.sent) == 1
    assert (await writer.append(ending("t9"), 30)).accepted


async def test_no_caller_waits_longer_than_its_deadline() -> None:
    line = Line()
    line.open.clear()
    writer = _writer(line)
    patient = asyncio.create_task(writer.append(ending("patient", 3), 60))
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await writer.append(ending("hasty"), 0.05)
    line.open.set()
    assert (await patient).step == 3


@given(st.lists(st.lists(st.integers(1, 300), max_size=4), max_size=4), st.integers(0, 2**40))
def test_samples_are_stored_as_they_came(tokens: list[list[int]], step: int) -> None:
    endings = [
        store_pb.AppendTrajectoryRequest(
            request_id=f"a{number}",
            step=step,
            state=common_pb.TRAJECTORY_STATE_COMPLETED,
            reason="x" * number,
            samples=[make_sample("q", turn, "t", tokens=size) for turn, size in enumerate(sizes)],
        )
        for number, sizes in enumerate(tokens)
    ]
    fills = [store_pb.FillColumnsRequest(request_id="f", sample_id="s")]
    sent = store_pb.WriteRequest(request_id="w", endings=endings, fills=fills)
    batch = WriteBatch.parse(sent.SerializeToString())
    assert (batch.request_id, list(batch.fills)) == ("w", fills)
    assert [list(rows) for rows in batch.raw_rows] == [
        [sample.SerializeToString() for sample in ending.samples] for ending in endings
    ]
    for one in endings:
        one.ClearField("samples")
    assert list(batch.endings) == endings


def test_bytes_that_are_not_a_message_are_refused_where_they_are_parsed() -> None:
    data = store_pb.WriteRequest(request_id="w", endings=[ending()]).SerializeToString()
    for cut in range(1, len(data)):
        with contextlib.suppress(DecodeError):
            assert WriteBatch.parse(data[:cut]).request_id == "w"[: cut - 2]


async def test_a_fault_of_one_part_does_not_affect_the_others(client: Client) -> None:
    await client.create(("checker", "solver"))
    versions = {"checker": 0, "solver": 0}
    await client.stub.OpenStep(client.open_request(versions=versions, query_ids=["q0", "q1"]))
    append, writer = client.append_request, client.writer
    other = make_sample("q0", 0, "q0-t1", policy="nobody")
    found: Any = await asyncio.gather(
        writer.append(append("q0", "q0-t0"), 30),
        writer.append(append("q9", "q9-t0"), 30),
        writer.append(append("q0", "q0-t1", samples=[other]), 30),
        writer.append(append("q1", "q1-t0", step=7), 30),
        writer.append(append("q1", "q1-t0", state=common_pb.TRAJECTORY_STATE_RUNNING), 30),
        writer.append(append("q1", "q1-t1"), 30),
        return_exceptions=True,
    )
    assert [one.accepted for one in (found[0], found[5])] == [True, True]
    errors: list[TroupeError] = found[1:5]
    assert [(type(error), error.kind) for error in errors] == [
        (FailedPrecondition, "unknown_query"),
        (InvalidArgument, "unknown_policy"),
        (FailedPrecondition, "step_not_open"),
        (InvalidArgument, "invalid_argument"),
    ]
    assert errors[3].field == "state"
    assert errors[3].remedy == "Send COMPLETED, FAILED or ABORTED."

    def fill(sample: str, policy: str = "solver") -> store_pb.FillColumnsRequest:
        return store_pb.FillColumnsRequest(
            request_id=new_id(), job_id=client.job, policy=policy, sample_id=sample, reward=2.0
        )

    rows = [make_sample("q0", turn, "q0-t1", reward=None) for turn in range(2)]
    assert (await writer.append(append("q0", "q0-t1", samples=rows), 30)).accepted
    filled: Any = await asyncio.gather(
        writer.fill(fill("q0_0_q0-t1"), 30),
        writer.fill(fill("none"), 30),
        writer.fill(fill("q0_1_q0-t1", "checker"), 30),
        writer.fill(fill("q0_1_q0-t1"), 30),
        return_exceptions=True,
    )
    assert [filled[0].accepted, filled[3].accepted] == [True, True]
    assert [type(one) for one in filled[1:3]] == [NotFound, NotFound]
    assert [one.value for one in filled[1:3]] == ["none", "q0_1_q0-t1"]


async def test_parts_repeated_in_another_call_have_no_second_effect(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    appends = [client.append_request("q0", f"q0-t{number}") for number in range(2)]
    for _ in range(2):
        answers = await asyncio.gather(*(client.writer.append(one, 30) for one in appends))
        assert [answer.accepted for answer in answers] == [True, True]
    # And one by one, and both at once within one call.
    assert (await client.stub.AppendTrajectory(appends[0])).accepted
    twice = store_pb.WriteRequest(request_id=new_id(), endings=[*appends, *appends])
    written = await client.stub.Write(twice)
    assert [one.response.accepted for one in written.endings] == [True] * 4
    another = client.append_request("q0", "q0-t0")
    assert not (await client.writer.append(another, 30)).accepted
    claim = await client.stub.ClaimMicroBatch(client.claim_request())
    assert len(claim.samples) == 2
