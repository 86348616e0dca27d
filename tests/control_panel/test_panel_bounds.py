"""The panel bounds and checks its clients' input: bodies, parameters, event ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from services.control_panel.app import MAX_BODY_BYTES, create_app
from tests.control_panel.conftest import Panel
from tests.support.waiting import PATIENCE, until
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

BLOCK = b"x" * 2**20


async def endless(blocks: int) -> AsyncIterator[bytes]:
    """A body in chunks, without a declared length."""
    for _ in range(blocks):
        yield BLOCK


def problem_of(reply: httpx.Response, status: int) -> dict[str, str]:
    """The problem that `reply` has to be."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    found: dict[str, str] = reply.json()
    assert found["detail"]
    assert found["remedy"]
    return found


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        "/api/jobs",
        "/api/jobs/x/resume",
        "/api/jobs/x/pause",
        "/api/functions",
        "/api/functions/f/invoke",
        "/api/jobs/x/policies/p/generate",
        "/nowhere",
    ],
)
async def test_a_body_that_is_too_large_is_refused_unread(
    panel: Panel, path: str, declared: bool
) -> None:
    blocks = 6 * MAX_BODY_BYTES // len(BLOCK)
    headers = {"Content-Type": "application/json"}
    if declared:
        headers["Content-Length"] = str(blocks * len(BLOCK))
    before = psutil.Process().memory_info().rss
    reply = await panel.http.post(path, content=endless(blocks), headers=headers)
    assert problem_of(reply, 413)["field"] == "body"
    assert psutil.Process().memory_info().rss - before < 4 * MAX_BODY_BYTES


async def test_a_body_that_does_not_come_is_given_up(
    panel: Panel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.http.bodies.BODY_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(panel.url).port)
    writer.write(
        b"POST /api/jobs HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/yaml\r\nContent-Length: 9\r\n\r\nab"
    )
    answer = await asyncio.wait_for(reader.read(2000), PATIENCE)
    writer.close()
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"application/problem+json" in answer


BAD_IDS = ["xx", "5-", "-5", "5-x", "\u0663-\u0661", "1" * 30, "$", "1-0-0", "1.5"]


@pytest.mark.parametrize("given", BAD_IDS)
async def test_a_wrong_event_id_is_named_before_the_stream_opens(panel: Panel, given: str) -> None:
    job_id = await panel.submit()
    path = f"/api/jobs/{job_id}/events"
    reply = await panel.http.get(path, params={"after": given})
    assert problem_of(reply, 422)["field"] == "query.after"
    reply = await panel.http.get(path, headers={"Last-Event-ID": given.encode()})
    assert problem_of(reply, 422)["field"] == "header.last-event-id"
    assert not panel.orchestrator.requests("WatchJob")


@pytest.mark.parametrize(
    "query",
    [
        "metrics?after_step=x",
        "metrics?after_step=1e3",
        f"metrics?after_step={2**63}",
        f"metrics?after_step={'9' * 5000}",
        "metrics?aftr_step=1",
        "trajectories?limit=0",
        "trajectories?limit=201",
        "trajectories?limit=NaN",
        "events?before=1",
        "policies/p/samples?state=weird",
        "policies/p/samples?state=ready%0A",
        "policies/p/samples?step=-1",
        "matches?limit=%00",
    ],
)
async def test_wrong_parameters_are_problems_that_name_them(panel: Panel, query: str) -> None:
    job_id = await panel.submit()
    reply = await panel.http.get(f"/api/jobs/{job_id}/{query}")
    name = query.partition("?")[2].partition("=")[0]
    assert problem_of(reply, 422)["field"] == f"query.{name}"


async def test_a_watch_that_can_never_succeed_ends_with_a_problem(panel: Panel) -> None:
    """The stream began, and then the job was gone: retries every second would never end."""
    job_id = await panel.submit()
    gone = asyncio.create_task(_gone_later(panel, job_id))
    events = [line async for line in _lines(panel, f"/api/jobs/{job_id}/events")]
    await gone
    assert "event: problem" in events
    data = json.loads(next(x for x in reversed(events) if x.startswith("data:"))[5:])
    assert data["title"] == "not_found"


async def _gone_later(panel: Panel, job_id: str) -> None:
    await until(lambda: panel.orchestrator.requests("WatchJob"))
    panel.orchestrator.break_after = 1
    del panel.orchestrator.jobs[job_id]
    await panel.orchestrator.log(
        job_id, orchestrator_pb.JobEvent(notice=orchestrator_pb.Notice(text="last"))
    )


async def _lines(panel: Panel, path: str) -> AsyncIterator[str]:
    async with asyncio.timeout(PATIENCE), panel.http.stream("GET", path) as reply:
        async for line in reply.aiter_lines():
            yield line


async def test_numbers_that_json_cannot_say_are_null(panel: Panel) -> None:
    job_id = await panel.submit()
    await panel.orchestrator.step(job_id, 1, loss=float("nan"), kl=float("inf"))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    rows = (await panel.http.get(f"/api/jobs/{job_id}")).text
    assert json.loads(rows, parse_constant=refuse)["metrics"] == {"loss": None, "kl": None}
    async for line in _lines(panel, f"/api/jobs/{job_id}/events"):
        if line.startswith("data:") and "loss" in line:
            values = json.loads(line[5:], parse_constant=refuse)["values"]
            assert values == {"loss": None, "kl": None}
            break


@pytest.mark.parametrize(
    "body", ['{"\\ud800": 1}', '{"messages": [{"role": "\\udfff"}], "x\\ud800": "\\ud800"}']
)
async def test_halves_of_characters_in_a_wrong_body_are_a_problem(panel: Panel, body: str) -> None:
    path = "/api/jobs/x/policies/p/generate"
    reply = await panel.http.post(
        path, content=body.encode(), headers={"Content-Type": "application/json"}
    )
    problem_of(reply, 422)


def test_every_error_answer_is_described_as_a_problem() -> None:
    document = create_app("127.0.0.1:1").openapi()
    described = 0
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if status[0] in "45":
                    assert list(answer["content"]) == ["application/problem+json"]
                    described += 1
    assert described >= 2 * len(document["paths"])
    for path in ("/api/jobs/{job_id}/events", "/api/cluster/events"):
        answered = document["paths"][path]["get"]["responses"]
        assert list(answered["200"]["content"]) == ["text/event-stream"]
        assert "5XX" in answered
