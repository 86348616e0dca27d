"""The effects of one client's long texts, half-sent bodies and closed connections on others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.waiting import PATIENCE, until
from tests.workflow.test_long_texts import LONG, Gate, agents_of, says
from troupe.endpoint.app import create_app
from troupe.endpoint.server import EndpointServer
from troupe.workflow import Agents
from troupe.workflow.backend import EndpointOptions, GeneratedTurn
from troupe.workflow.trying.tokenizer import ByteTokenizer

HUGE = "x" * (15 << 20)
SHORT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def user(content: str) -> dict[str, Any]:
    """A request with one message."""
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}


def requests(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request with `text` to each route."""
    return {
        "chat": ("/chat/completions", user(text)),
        "tool result": (
            "/chat/completions",
            {"messages": [*SHORT["messages"], {"role": "tool", "content": text}]},  # type: ignore[misc]
        ),
        "completions": ("/completions", {"prompt": text}),
        "completions of several": ("/completions", {"prompt": ["hi", text]}),
        "responses": ("/responses", {"input": text}),
        "messages": ("/messages", user(text)),
        "count_tokens": ("/messages/count_tokens", user(text)),
    }


@asynccontextmanager
async def served(*trajectories: Agents, **options: Any) -> AsyncIterator[list[str]]:
    """The base URLs of the solvers of several trajectories, on one server."""
    server = EndpointServer(**options)
    try:
        yield [server.open(agents["solver"])[1].base_url for agents in trajectories]
    finally:
        await server.stop()


@pytest.mark.parametrize("which", requests(""))
async def test_turns_of_other_trajectories_go_on_while_a_long_text_is_read(which: str) -> None:
    gate = Gate()
    path, body = requests("x" * LONG)[which]
    async with (
        served(agents_of(gate), agents_of(gate)) as (one, other),
        httpx.AsyncClient(timeout=PATIENCE) as client,
    ):
        long = asyncio.create_task(client.post(one + path, json=body))
        for _ in range(10):
            assert (await client.post(other + "/chat/completions", json=SHORT)).status_code == 200
        assert not long.done()
        gate.opened.set()
        assert (await long).status_code == 200


@pytest.mark.parametrize("which", requests(""))
async def test_fifteen_mebibytes_are_refused_by_name_before_they_are_tokenised(which: str) -> None:
    gate = Gate()
    gate.opened.set()
    path, body = requests(HUGE)[which]
    async with (
        served(agents_of(gate, context=2048)) as (url,),
        httpx.AsyncClient(timeout=PATIENCE) as client,
    ):
        answer = await client.post(url + path, json=body)
    assert answer.status_code == 400
    assert "leaves no room for a response in a context of 2048 tokens" in answer.text
    assert gate.characters < 300_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 50_000}),
        ("/messages", {"messages": [{"role": "user", "content": "x"}] * 50_000, "max_tokens": 8}),
        ("/responses", {"input": [{"role": "user", "content": "x"}] * 50_000}),
        ("/completions", {"prompt": [1] * 500_000}),
        ("/completions", {"prompt": [[1], [1] * 500_000]}),
    ],
)
async def test_more_messages_or_ids_than_fit_are_refused_and_leave_no_turn(
    path: str, body: dict[str, Any]
) -> None:
    agents = agents_of(Gate(), context=2048)
    async with served(agents) as (url,), httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(url + path, json=body)
    assert answer.status_code == 400
    assert "in a context of 2048 tokens" in answer.text
    assert not agents.close()
    assert not agents.unawaited


MANY: list[bytes] = [
    b'{"messages": [' + b",".join([b"{}"] * 150_000) + b"]}",
    b'{"messages": [], "tools": [' + b",".join([b"[]"] * 150_000) + b"]}",
    b"[" * 150_000,
    b'"' + b'\\"{' * 10 + b'"' + b"{" * 150_000 + b'"',
]


@pytest.mark.parametrize("body", MANY)
async def test_a_body_with_too_many_objects_is_refused_unparsed(body: bytes) -> None:
    async with served(agents_of(Gate())) as (url,), httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(url + "/chat/completions", content=body)
    assert answer.status_code == 413
    assert "objects and lists" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"messages": [], "prompt": [' + b"1," * 3_000_000 + b"1]}", "3000001 values"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}", "300000 fields"),
        (b'{"metadata": {' + b",".join([b'"":""'] * 300_000) + b"}}", "300001 fields"),
    ],
)
async def test_a_body_with_too_many_values_is_refused_unparsed(body: bytes, what: str) -> None:
    async with served(agents_of(Gate())) as (url,), httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(url + "/completions", content=body)
    assert answer.status_code == 413
    assert what in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["1:2," * 3_000_000, "{[" * 200_000, '\\"{' * 200_000, "\\" * 200_001 + "{" * 200_000]
)
async def test_brackets_in_texts_do_not_count_as_objects(text: str) -> None:
    async with (
        served(agents_of(ByteTokenizer())) as (url,),
        httpx.AsyncClient(timeout=PATIENCE) as http,
    ):
        answer = await http.post(url + "/chat/completions", json=user(text))
    assert answer.status_code == 200


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 2_000_000, b"{[" * 60_000 + b'"\\'])
async def test_unfinished_strings_are_searched_once(body: bytes) -> None:
    """A search that restarted at each quotation mark would take hours."""
    async with served(agents_of(Gate())) as (url,), httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(url + "/chat/completions", content=b"{" * 100_001 + body)
    assert answer.status_code == 413


@pytest.mark.parametrize("header", [b"Transfer-Encoding: chunked", b"Content-Length: 900000"])
async def test_half_sent_bodies_of_one_trajectory_do_not_keep_the_others_out(
    header: bytes,
) -> None:
    half = b"1\r\n{\r\n" if header.endswith(b"chunked") else b"{"
    async with (
        served(agents_of(Gate()), agents_of(Gate()), max_body=1 << 20) as (one, other),
        httpx.AsyncClient(timeout=PATIENCE) as client,
    ):
        at = urlsplit(one)
        request = b"POST %s/chat/completions HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s"
        writers = []
        for _ in range(40):
            _, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(request % (at.path.encode(), header, half))
            await writer.drain()
            writers.append(writer)
        body = user("y" * 80_000)
        answers = await asyncio.gather(
            *(client.post(other + "/chat/completions", json=body) for _ in range(4))
        )
        assert [answer.status_code for answer in answers] == [200] * 4
        for writer in writers:
            writer.close()


IDLE = {
    "silent": b"",
    "half a head": b"POST /t/x/solver/v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    "kept for a next request": b"GET /t/x/solver/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("how", IDLE)
async def test_connections_without_a_request_do_not_use_up_the_open_files(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.endpoint.server.most_idle", lambda: 8)
    paced = Paced()
    busy = Agents({"solver": agents_of(Gate())["solver"].role}, paced, seed=1)
    async with (
        served(agents_of(Gate()), busy) as (one, other),
        httpx.AsyncClient(timeout=PATIENCE) as client,
    ):
        asked = [
            asyncio.create_task(client.post(other + "/chat/completions", json=SHORT))
            for _ in range(12)
        ]
        await until(lambda: paced.asked == 12)
        at = urlsplit(one)
        opened = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(IDLE[how])
            opened.append((reader, writer))
            if how.startswith("kept"):
                await reader.readuntil(b"}}")
        closed = [asyncio.create_task(reader.read()) for reader, _ in opened]
        ended, _ = await asyncio.wait(closed[:12], timeout=PATIENCE)
        assert len(ended) == 12
        assert not any(one.done() for one in closed[12:])
        paced.go_on.set()
        assert {(await answer).status_code for answer in asked} == {200}
        for _, writer in opened:
            writer.close()
        await asyncio.wait(closed, timeout=PATIENCE)


class Paced:
    """A backend whose turns end when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = asyncio.Event()

    async def generate(self, agent: str, prompt_ids: Any, sampling: Any) -> GeneratedTurn:
        """One turn."""
        self.asked += 1
        await self.go_on.wait()
        return GeneratedTurn(says(agent, prompt_ids, sampling), [-1.0, -1.0], (), "length")


class Client:
    """A client of the application itself, whose closing of the connection is noticed exactly when
    the test says so."""

    def __init__(self, agents: Agents) -> None:
        found = agents["solver"], EndpointOptions()
        self._app = create_app(
            lambda token, agent: found, lambda *call: None, max_body=1 << 20, keep_alive=0.001
        )
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request and read the answer."""
        unread = [json.dumps(body).encode()]

        async def receive() -> dict[str, Any]:
            if not unread:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "POST",
            "path": f"/t/token/solver/v1{path}",
            "headers": [(b"content-length", str(len(unread[0])).encode())],
            "query_string": b"",
        }
        await self._app(scope, receive, send)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", SHORT),
    "a stream": ("/chat/completions", {**SHORT, "stream": True}),
    "several": ("/chat/completions", {**SHORT, "n": 3}),
    "completions": ("/completions", {"prompt": ["a", "b"]}),
    "responses": ("/responses", {"input": "hi"}),
    "messages": ("/messages", user("hi")),
}


async def begun(which: str) -> tuple[Agents, Paced, Client, asyncio.Task[None]]:
    """A request whose turns are being generated."""
    agents, backend = agents_of(Gate()), Paced()
    agents["solver"].trajectory.backend = backend
    client = Client(agents)
    request = asyncio.create_task(client.post(*REQUESTS[which]))
    await until(lambda: backend.asked == len(agents.begun) > 0)
    return agents, backend, client, request


@pytest.mark.parametrize("turn_first", [False, True])
@pytest.mark.parametrize("which", REQUESTS)
async def test_a_turn_whose_client_is_gone_when_it_ends_does_not_count(
    which: str, turn_first: bool
) -> None:
    agents, backend, client, request = await begun(which)
    for event in [backend.go_on, client.gone] if turn_first else [client.gone, backend.go_on]:
        event.set()
    await asyncio.wait_for(request, PATIENCE)
    await until(lambda: all(turn.over for turn in agents.begun) and not agents.turns)

    kept = Client(agents)
    await kept.post("/chat/completions", SHORT)
    assert kept.sent[0]["status"] == 200
    assert len(agents.close()) == 1
    assert not agents.unawaited


@pytest.mark.parametrize("which", REQUESTS)
async def test_a_turn_whose_client_leaves_while_it_is_generated_does_not_count(which: str) -> None:
    agents, _, client, request = await begun(which)
    client.gone.set()
    await asyncio.wait_for(request, PATIENCE)
    await until(lambda: all(turn.over for turn in agents.begun))
    assert not agents.close()


async def test_an_answer_that_was_sent_is_a_turn_whatever_its_client_does_then() -> None:
    agents = agents_of(Gate())
    async with served(agents) as (url,), httpx.AsyncClient() as client:
        for _ in range(5):
            assert (await client.post(url + "/chat/completions", json=SHORT)).status_code == 200
    assert len(agents.close()) == 5


async def test_a_conversation_does_not_go_on_from_a_reply_that_nobody_received() -> None:
    agents = agents_of(Gate())
    solver = agents["solver"]
    lost = await solver.chat("hi")
    solver.withdraw([lost])
    kept = await solver.chat("hi")
    assert kept.text == lost.text
    await solver.chat([{"role": "user", "content": "hi"}, kept, {"role": "user", "content": "so?"}])
    first, second = agents.close()
    assert tuple(second.prompt_ids[: len(first.prompt_ids)]) == tuple(first.prompt_ids)
    assert first.reply is kept
