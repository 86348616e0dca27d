"""Batches, streams, logs, retries, deletion: every call has an outcome of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.reward.function import LineSplitter
from tests.reward.test_reward_scaling import until_listed
from tests.reward.test_reward_service import Client, client_of
from tests.support.waiting import until
from troupe.rpc import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, new_id
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with client_of(reward_workers=2, reward_min_workers=2) as client:
        yield client


def batch(
    client: Client, name: str, arguments: list[Any], **fields: Any
) -> reward_pb.InvokeBatchRequest:
    return reward_pb.InvokeBatchRequest(
        name=name,
        version=client.versions[name],
        calls=[
            reward_pb.BatchCall(invocation_id=new_id(), arguments_json=json.dumps(one))
            for one in arguments
        ],
        **fields,
    )


async def test_results_in_order_and_each_error_its_own(client: Client) -> None:
    await client.register("mixed", kind="reward")
    ends = ["ok", "raise", "ok", "nan", "none", "die", "ok", "memory", "ok"]
    for _ in range(2):  # not known to be short, then sent ahead of each other
        request = batch(client, "mixed", [{"i": i, "end": end} for i, end in enumerate(ends)])
        request.calls.add(invocation_id=new_id(), arguments_json="[]")
        responses = (await client.stub.InvokeBatch(request)).responses
        for i, (end, response) in enumerate(zip(ends, responses, strict=False)):
            if end == "ok":
                assert json.loads(response.result_json) == i
        kinds = [response.error.kind for response in responses]
        assert kinds == [
            *(0, Kind.KIND_RAISED, 0, Kind.KIND_BAD_RESULT, Kind.KIND_BAD_RESULT),
            *(Kind.KIND_WORKER_DIED, 0),
            *(Kind.KIND_OUT_OF_MEMORY, 0, Kind.KIND_BAD_ARGUMENTS),
        ]
        # A returning caller finds the earlier result.
        again = await client.stub.InvokeBatch(request)
        assert list(again.responses) == list(responses)


async def test_a_call_of_a_batch_is_known_by_its_id_everywhere(client: Client) -> None:
    await client.register("score")
    request = batch(client, "score", [{"answer": "a", "expected": "a"}])
    (first,) = (await client.stub.InvokeBatch(request)).responses
    key = request.calls[0].invocation_id
    assert (
        await client.invoke("score", {"answer": "a", "expected": "a"}, invocation_id=key) == first
    )
    with pytest.raises(AlreadyExists):
        await client.invoke("score", {"answer": "b", "expected": "a"}, invocation_id=key)
    request.calls.add().CopyFrom(request.calls[0])
    with pytest.raises(InvalidArgument, match="twice"):
        await client.stub.InvokeBatch(request)


async def test_a_slow_call_keeps_nobody_behind_it(client: Client, tmp_path: Path) -> None:
    await client.register("stamps", kind="reward")
    for _ in range(3):
        await client.invoke("stamps", {"path": str(tmp_path / "warm")})
    slow = {"path": str(tmp_path / "slow"), "seconds": 60}
    request = batch(
        client, "stamps", [slow, *({"path": str(tmp_path / str(i))} for i in range(40))]
    )
    call = asyncio.ensure_future(client.stub.InvokeBatch(request))
    for i in range(40):
        await until((tmp_path / str(i)).exists)
    assert not call.done()
    key = request.calls[0].invocation_id
    assert (
        await client.stub.CancelInvocation(reward_pb.CancelInvocationRequest(invocation_id=key))
    ).cancelled
    responses = (await call).responses
    assert responses[0].error.kind == Kind.KIND_CANCELLED
    assert not any(response.HasField("error") for response in responses[1:])


async def test_a_stream_tells_what_happens_until_the_outcome(client: Client) -> None:
    await client.register("prints")
    request = reward_pb.InvokeRequest(
        invocation_id=new_id(), name="prints", version=client.versions["prints"], job_id="job-a"
    )
    events = [event async for event in client.stub.InvokeStream(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["queued", "started", "output", "output", "output", "outcome"]
    assert [event.output for event in events[2:5]] == ["one\n", "two\n", "three\n"]
    assert events[-1].outcome.result_json == '"done"'
    # The same once more: only how it ended is known.
    (again,) = [event async for event in client.stub.InvokeStream(request)]
    assert again.outcome == events[-1].outcome
    with pytest.raises(NotFound):
        async for _ in client.stub.InvokeStream(
            reward_pb.InvokeRequest(invocation_id="x", name="none")
        ):
            pass


async def test_output_is_streamed_while_it_runs(client: Client, tmp_path: Path) -> None:
    await client.register("prints_and_waits")
    go = tmp_path / "go"
    request = reward_pb.InvokeRequest(
        invocation_id=new_id(),
        name="prints_and_waits",
        version=client.versions["prints_and_waits"],
        arguments_json=json.dumps({"path": str(go)}),
    )
    heard = []
    async for event in client.stub.InvokeStream(request):
        heard.append(event)
        if event.output == "waiting\n":
            go.touch()  # it ends only because its output came before its end
    assert heard[-1].outcome.result_json == "true"


@pytest.mark.parametrize("debugger", [False, True])
async def test_a_breakpoint_says_where_it_is_and_how_to_debug(
    client: Client, debugger: bool
) -> None:
    await client.register("stops")
    response = await client.invoke("stops", {"debugger": debugger})
    assert response.error.kind == Kind.KIND_RAISED
    assert "there is a breakpoint at reward_functions.py:" in response.error.message
    assert "troupe workflow try" in response.error.message
    assert "in stops" in response.error.traceback


async def test_logs_are_kept_by_function_and_followed(client: Client) -> None:
    await client.register("prints", version="logged")
    await client.invoke("prints", job_id="job-a")
    await client.invoke("prints", job_id="job-b")
    ask = reward_pb.ReadLogsRequest(name="prints", version="logged", job_id="job-b", lines=2)
    texts = [line.text async for line in client.stub.ReadLogs(ask)]
    assert texts == ["two", "three"]
    ask = reward_pb.ReadLogsRequest(name="prints", version="logged", lines=1, follow=True)
    lines = client.stub.ReadLogs(ask)
    assert (await anext(aiter(lines))).job_id == "job-b"
    invoked = asyncio.create_task(client.invoke("prints", job_id="job-c"))
    followed = [await anext(aiter(lines)) for _ in range(3)]
    assert [(line.job_id, line.text) for line in followed] == [
        ("job-c", "one"),
        ("job-c", "two"),
        ("job-c", "three"),
    ]
    await invoked
    # Its end is the end of what follows it.
    gone = reward_pb.DeleteFunctionRequest(request_id=new_id(), name="prints", version="logged")
    assert (await client.stub.DeleteFunction(gone)).deleted
    assert [line async for line in lines] == []
    with pytest.raises(NotFound):
        await client.invoke("prints")


async def test_a_call_whose_worker_died_is_retried_as_often_as_declared(
    client: Client, tmp_path: Path
) -> None:
    for retries, kinds in ((1, Kind.KIND_WORKER_DIED), (2, 0)):
        await client.register("dies_at_first", retries=retries)
        marks = tmp_path / str(retries)
        response = await client.invoke("dies_at_first", {"path": str(marks), "times": 2})
        assert response.error.kind == kinds
        assert response.attempts == retries + 1
    # Errors and wrong results are not the worker's fault.
    await client.register("raises", retries=3)
    assert (await client.invoke("raises")).attempts == 1


async def test_a_functions_own_queue_is_limited(client: Client) -> None:
    await client.register("sleeps", max_queued=20, max_concurrency=1)
    with pytest.raises(InvalidArgument, match="may ever wait"):
        await client.stub.InvokeBatch(batch(client, "sleeps", [{"seconds": 0}] * 21))
    calls = [
        asyncio.create_task(client.invoke("sleeps", {"seconds": 60}, invocation_id=f"limited {i}"))
        for i in range(21)
    ]
    await until_listed(client, lambda listed: listed.pool.queued == 20)
    request = batch(client, "sleeps", [{"seconds": 0}])
    with pytest.raises(ResourceExhausted) as full:
        # A retry after all waiting calls would be later than this, so that none is made.
        await client.stub.InvokeBatch(request, timeout=5)
    assert full.value.retry_after_ms
    gone = reward_pb.DeleteFunctionRequest(
        request_id=new_id(), name="sleeps", version=client.versions["sleeps"]
    )
    await client.stub.DeleteFunction(gone)
    for call in calls:
        assert (await call).error.kind == Kind.KIND_CANCELLED


async def test_jobs_take_turns(tmp_path: Path) -> None:
    """The next job's first call does not wait for all calls of one job, however many there are."""
    async with client_of(reward_workers=1) as alone:
        await alone.register("waits", version="turns")
        version = alone.versions["waits"]
        given = tmp_path / "given"
        ended: list[str] = []

        async def call(job: str) -> None:
            request = reward_pb.InvokeRequest(
                invocation_id=new_id(),
                name="waits",
                version=version,
                arguments_json=json.dumps({"path": str(given)}),
                job_id=job,
            )
            await alone.stub.Invoke(request)
            ended.append(job)

        greedy = [asyncio.create_task(call("greedy")) for _ in range(20)]
        await alone.until_running("waits", 1, queued=19)
        modest = [asyncio.create_task(call("modest")) for _ in range(3)]
        await alone.until_running("waits", 1, queued=22)
        given.touch()
        await asyncio.gather(*greedy, *modest)
        assert ended.index("modest") < 10
        last = len(ended) - 1 - ended[::-1].index("modest")
        assert ended[last + 1 :].count("greedy") >= 8


async def test_lines_come_whole_and_a_flood_is_cut() -> None:
    heard: list[str] = []
    lines = LineSplitter(heard.append)
    lines.add(b"on")
    lines.add(b"e\ntw\xc3")
    lines.add(b"\xb6\n\nrest")
    assert heard == ["one", "twö", ""]
    lines.end()
    assert heard.pop() == "rest"
    heard.clear()
    lines.add(b"y\n" * 10_000)
    assert heard[0] == "(9,800 lines left out)"
    assert heard[1:] == ["y"] * 200
    heard.clear()
    lines.add(b"x" * 10_000)
    lines.end()
    assert "".join(heard) == "x" * 10_000
    assert len(heard) == 3


async def test_a_result_that_the_answer_has_no_room_for_fails_alone() -> None:
    """Nine results of 400 kB, one message of 1 MiB: two and the small ones arrive."""
    async with client_of(reward_workers=1, max_message_mib=1) as client:
        await client.register("wide")
        sizes = [400_000] * 3 + [10] + [400_000] * 6 + [10]
        request = batch(client, "wide", [{"size": size, "i": i} for i, size in enumerate(sizes)])
        responses = (await client.stub.InvokeBatch(request)).responses
        lost = [i for i, one in enumerate(responses) if one.WhichOneof("outcome") == "error"]
        assert lost == [2, 4, 5, 6, 7, 8, 9]
        assert {responses[i].error.kind for i in lost} == {Kind.KIND_RESULT_TOO_LARGE}
        assert "invoke with the same id alone" in responses[2].error.message
        # Calls that have run are not run again: each comes alone.
        alone = await client.invoke(
            "wide",
            json.loads(request.calls[9].arguments_json),
            invocation_id=request.calls[9].invocation_id,
        )
        assert len(json.loads(alone.result_json)["text"]) == 400_000
        functions = (await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())).functions
        assert [one.invocations for one in functions] == [len(sizes)]
