"""The server alone, in front of agents whose engine is a few lines."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.waiting import PATIENCE, until
from tests.workflow.stage import Script, make_agents, make_chat
from troupe.endpoint.server import EndpointServer
from troupe.rpc.errors import Unavailable
from troupe.workflow import Agents, TurnError

CHAT = make_chat()
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@asynccontextmanager
async def served(script: Script, **options: Any) -> AsyncIterator[tuple[Agents, str]]:
    """Agents and the base URL of their solver."""
    server = EndpointServer(**options)
    agents = make_agents(script, CHAT)
    try:
        _, endpoint = server.open(agents["solver"])
        yield agents, endpoint.base_url
    finally:
        await server.stop()


def speaks(agent: str, prompt: Any, sampling: Any) -> list[int]:
    return [*CHAT.encode("hello"), 2]


async def test_a_stream_says_that_its_turn_is_still_generated() -> None:
    script = Script(speaks, delay=lambda number: 0.5)
    async with served(script, keep_alive=0.05) as (_, url), httpx.AsyncClient() as client:
        answer = await client.post(url + "/chat/completions", json=BODY)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[0].startswith(": ")
    assert "hello" in answer.text
    assert lines[-2] == "data: [DONE]"


async def test_a_failed_turn_is_the_last_event_of_its_stream() -> None:
    def fails(agent: str, prompt: Any, sampling: Any) -> list[int]:
        raise TurnError("no engine", kind="deadline")

    script = Script(fails, delay=lambda number: 0.3)
    async with served(script, keep_alive=0.05) as (_, url):
        client = AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
        stream = await client.chat.completions.create(**BODY)
        with pytest.raises(openai.APIError, match="no engine") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "deadline"
        await client.close()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TurnError("late", kind="deadline"), 504, "deadline"),
        (TurnError("gone", kind="job_released"), 404, "not_found"),
        (TurnError("no", kind="non_finite_logits"), 500, "non_finite_logits"),
        (ZeroDivisionError("ours"), 500, "internal"),
    ],
)
async def test_a_failed_turn_is_told_once_and_not_asked_for_again(
    error: Exception, status: int, code: str
) -> None:
    def fails(agent: str, prompt: Any, sampling: Any) -> list[int]:
        raise error

    script = Script(fails)
    async with served(script) as (_, url), AsyncOpenAI(base_url=url, api_key="x") as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=BODY["messages"])
    assert caught.value.status_code == status
    assert caught.value.code == code
    assert len(script.asked) == 1


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = EndpointServer(port=taken.getsockname()[1])
        with pytest.raises(Unavailable, match="in use") as caught:
            server.listen()
        await server.stop()
    assert "TROUPE_ENDPOINT_PORT" in (caught.value.remedy or "")


async def test_clients_may_reach_it_under_another_name() -> None:
    server = EndpointServer(url="http://worker.example:8443/")
    try:
        _, endpoint = server.open(make_agents(Script(speaks))["solver"])
        assert endpoint.base_url.startswith("http://worker.example:8443/t/")
    finally:
        await server.stop()


async def test_the_end_of_the_worker_is_not_held_up_by_clients() -> None:
    script = Script(speaks, delay=lambda number: 60)
    async with httpx.AsyncClient() as client:
        async with served(script) as (_, url):
            asking = asyncio.create_task(client.post(url + "/chat/completions", json=BODY))
            await until(lambda: script.asked)
        # It is refused, or its connection closed: it does not wait.
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({asking})
        asking.exception()


async def test_addresses_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    script = Script(speaks)
    async with served(script) as (_, url), AsyncOpenAI(base_url=url, api_key="x") as client:
        await client.chat.completions.create(model="m", messages=BODY["messages"])
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[])
    assert url.split("/")[4] not in caplog.text
