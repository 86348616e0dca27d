"""Requests in the forms that frameworks send, and their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from tests.endpoint.stage import ADD, TOOLED, calls
from tests.workflow.stage import Script, make_agents, make_beginning_chat, make_chat
from troupe.endpoint.promises import mismatch
from troupe.endpoint.server import EndpointServer, TrajectoryEndpoints
from troupe.workflow import Agents
from troupe.workflow.backend import ENDPOINT_OPTIONS, EndpointOptions
from troupe.workflow.samples import metrics_of

CHAT = make_chat(TOOLED)
ASKED = {"role": "user", "content": "what is 3+4?"}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["answer", "why"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "A", "schema": SCHEMA, "strict": True}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "add"}}
THOUGHT = f"<think>perhaps {calls(a=0, b=0)}</think>"


class Served:
    """The solver of a trajectory behind an address."""

    def __init__(self, agents: Agents, url: str, script: Script) -> None:
        self.agents, self.url, self.script = agents, url, script
        self.http = httpx.AsyncClient()

    async def post(self, path: str = "/chat/completions", **body: Any) -> httpx.Response:
        if path == "/chat/completions":
            body = {"model": "m", "messages": [ASKED], **body}
        return await self.http.post(self.url + path, json=body)

    def prompt(self, number: int = -1) -> str:
        return CHAT.transcript(self.script.asked[number][1])


@asynccontextmanager
async def served(
    *texts: str, options: EndpointOptions = ENDPOINT_OPTIONS, seed: int = 7, **more: Any
) -> AsyncIterator[Served]:
    """An agent that says one text after another, then the last one for ever."""
    chat = more.pop("chat", CHAT)
    left = [[*chat.encode(text), 2] for text in texts or ("ok",)]
    script = Script(
        lambda agent, prompt, sampling: left.pop(0) if len(left) > 1 else left[0],
        delay=more.pop("delay", lambda number: 0.0),
    )
    server = EndpointServer(**more)
    agents = make_agents(script, chat, seed=seed)
    doors = TrajectoryEndpoints(server)
    try:
        one = Served(agents, doors.open(agents["solver"], options).base_url, script)
        async with one.http:
            yield one
    finally:
        await server.stop()


LENIENT = EndpointOptions(lenient=True)


def events(answer: httpx.Response) -> list[Any]:
    found = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1] if not one.startswith(":")]


async def test_thoughts_are_separate_and_their_calls_are_ignored() -> None:
    async with served(f"{THOUGHT}No.", f"{THOUGHT}So.{calls(a=1, b=2)}", "ok") as one:
        answer = (await one.post(tools=[ADD])).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == "No."
        assert message["reasoning_content"] == THOUGHT[7:-8]
        assert "tool_calls" not in message
        assert answer["choices"][0]["finish_reason"] == "stop"
        called = (await one.post(tools=[ADD])).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        [call] = called["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        history = [ASKED, called["message"], {"role": "tool", "tool_call_id": call["id"]}]
        await one.post(tools=[ADD], messages=history)
        assert one.script.asked[-1][1][: len(one.script.asked[1][1])] == one.script.asked[1][1]
        assert not any(turn.prefix_broken for turn in one.agents.begun)
        shown = (await one.post(tools=[ADD], tool_choice="none")).json()["choices"][0]["message"]
        assert shown["content"] == "ok"


async def test_a_client_names_its_conversations() -> None:
    async with served("ok") as one:
        await one.post()
        one.http.headers["X-Session-ID"] = "second"
        await one.post()
        await one.post(stream=True)
        named = [turn.reply and turn.reply.session for turn in one.agents.turns]
        assert named == ["", "second", "second"]


async def test_a_stream_brings_thoughts_text_and_each_call_by_itself() -> None:
    text = f"{THOUGHT}So.{calls(a=1, b=2)}{calls(a=3, b=4)}"
    async with served(text) as one:
        whole = (await one.post(tools=[ADD])).json()["choices"][0]
        parts = events(await one.post(tools=[ADD], stream=True, return_token_ids=True))
        client = AsyncOpenAI(base_url=one.url, api_key="x", http_client=one.http)
        asked: Any = {"model": "m", "messages": [ASKED], "tools": [ADD]}
        async with client.chat.completions.stream(**asked) as stream:
            final = (await stream.get_final_completion()).choices[0]
    deltas = [part["choices"][0]["delta"] for part in parts]
    # Some clients look at the first thing in a delta and at nothing else.
    assert all(len({"content", "tool_calls", "reasoning_content"} & d.keys()) < 2 for d in deltas)
    assert [list(delta)[-1] for delta in deltas if delta] == [
        "content",
        "reasoning_content",
        "content",
        "tool_calls",
        "tool_calls",
    ]
    assert [d["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d] == [0, 1]
    assert [p["choices"][0]["finish_reason"] for p in parts][-2:] == [None, "tool_calls"]
    assert parts[0]["prompt_token_ids"] == list(one.script.asked[0][1])
    assert final.message.content == whole["message"]["content"] == "So."
    made = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [c.function.arguments for c in final.message.tool_calls] == [
        c["arguments"] for c in made
    ]


async def test_the_first_comment_of_a_stream_comes_after_one_interval() -> None:
    async with served(delay=lambda number: 0.5, keep_alive=0.3) as one:
        lines = (await one.post(stream=True)).text.split("\n\n")
    assert [line[0] for line in lines[:2]] == [":", "d"]


async def test_events_are_lines_to_every_client() -> None:
    async with served(json.dumps({"a": "x"})) as one:
        reply = await one.agents["solver"].chat("hi")
    from troupe.endpoint.openai_forms import event

    text = event({"content": "a\u2028b\x85c\ud800" + reply.text})
    assert text.isascii()
    assert len(text.splitlines()) == 2
    assert json.loads(text[6:])["content"].startswith("a\u2028b\x85c\ud800")


async def test_a_clients_seed_differs_between_the_trajectories_of_a_group() -> None:
    seeds: dict[int, list[Any]] = {}
    for seed in (1, 2):
        async with served(seed=seed) as one:
            for _ in range(2):
                await one.post(seed=42)
            await one.post(seed=42, n=2)
            await one.post(seed=43)
            await one.post("/completions", prompt="a", seed=10**30)
            seeds[seed] = [turn.sampling.seed for turn in one.agents.begun]
    first, again, *others = seeds[1]
    assert first == again, "the same request is repeatable in its trajectory"
    assert len(set(seeds[1] + seeds[2])) == 2 * len({first, *others})
    assert all(0 <= one < 2**31 for one in seeds[1] + seeds[2])


@pytest.mark.parametrize("by", ["job", "client"])
async def test_an_option_decides_whether_job_or_client_sets_the_sampling(by: Any) -> None:
    asks = {"temperature": 0.0, "top_p": 0.5, "top_k": 3}
    with capture_logs() as logs:
        async with served(options=EndpointOptions(sampling=by)) as one:
            for _ in range(3):
                await one.post(**asks, max_tokens=9)
            await one.post("/completions", prompt="a", **asks)
            await one.post(temperature=1.0)
            drawn = [turn.sampling for turn in one.agents.begun]
    told = [entry["field"] for entry in logs if "not followed" in entry["event"]]
    if by == "job":
        assert {(s.temperature, s.top_p, s.top_k) for s in drawn} == {(1.0, 1.0, -1)}
        assert told == ["temperature", "top_p", "top_k"], "once each"
    else:
        assert (drawn[0].temperature, drawn[3].top_p, drawn[0].top_k) == (0.0, 0.5, 3)
        assert not told
    assert drawn[0].max_new_tokens == 9


BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {},
    "/responses": {"input": "hi"},
    "/messages": {"messages": [ASKED], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
async def test_top_k_0_is_all_tokens_as_in_a_job(path: str) -> None:
    with capture_logs() as logs:
        for options in (EndpointOptions(), EndpointOptions(sampling="client")):
            async with served(options=options) as one:
                answer = await one.post(path, top_k=0, **BODIES[path])
                assert answer.status_code == 200, answer.text
                assert [turn.sampling.top_k for turn in one.agents.begun] == [-1]
    assert not [entry for entry in logs if "not followed" in entry["event"]]


PROMISES: Sequence[tuple[dict[str, Any], str, str, str]] = [
    # (the request's constraint, a reply that satisfies it, one that does not, the field)
    ({"tools": [ADD], "tool_choice": "required"}, calls(a=1, b=2), "7", "tool_choice"),
    ({"tools": [ADD], "tool_choice": NAMED}, calls(a=1, b=2), calls("sub"), "tool_choice"),
    (
        {"tools": [ADD], "parallel_tool_calls": False},
        calls(a=1, b=2),
        calls(a=1, b=2) * 2,
        "parallel_tool_calls",
    ),
    (
        {"response_format": FORMAT},
        '{"answer": 7, "why": "so"}',
        '{"answer": "7", "why": "so"}',
        "response_format",
    ),
    (
        {"response_format": FORMAT},
        '<think>?</think>{"answer": 7, "why": ""}',
        "7",
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}}, "{}", "[]", "response_format"),
    ({"response_format": {"type": "json_object"}}, "{}", '{"a": 1e400}', "response_format"),
]


@pytest.mark.parametrize(("asks", "kept", "broken", "field"), PROMISES)
async def test_a_lenient_endpoint_reports_constraints_that_a_reply_breaks(
    asks: dict[str, Any], kept: str, broken: str, field: str
) -> None:
    async with served(kept, broken, broken, options=LENIENT) as one:
        good = (await one.post(**asks)).json()["choices"][0]
        assert good["unmet"] == []
        bad = (await one.post(**asks)).json()["choices"][0]
        assert [unmet["param"] for unmet in bad["unmet"]] == [field]
        assert bad["unmet"][0]["message"]
        last = events(await one.post(**asks, stream=True))[-1]["choices"][0]
        assert [unmet["param"] for unmet in last["unmet"]] == [field]
        assert metrics_of(one.agents.turns)["unmet_promises"] == 2
        assert "unmet" not in (await one.post()).json()["choices"][0]
        assert "<|im_start|>system\n" in one.prompt(0)
    async with served() as strict:
        refused = (await strict.post(**asks)).json()["error"]
        assert (refused["param"], refused["code"]) == (field, "unsupported_value")
        assert "lenient=True" in refused["message"]
        assert not strict.agents.begun


async def test_the_model_sees_the_schema_and_the_agents_own_prompt() -> None:
    async with served("{}", options=LENIENT) as one:
        one.agents["solver"].role = one.agents["solver"].role.__class__(
            "solver", "p", CHAT, one.agents["solver"].role.sampling, "You add."
        )
        await one.post(response_format=FORMAT)
        assert one.prompt().count("<|im_start|>system") == 1
        assert "You add.\n\n" in one.prompt()
        for name in ("answer", "why", "integer"):
            assert name in one.prompt()
        parts = [{"type": "text", "text": "Be brief."}]
        system = {"role": "developer", "content": parts}
        await one.post(messages=[system, ASKED], response_format=FORMAT)
        assert "Be brief.\n" in one.prompt()
        assert '"answer"' in one.prompt()
        assert "You add." not in one.prompt()


async def test_the_arguments_of_a_strict_tool_are_looked_at() -> None:
    """Pydantic AI sends `strict` for every tool, so that it must not be refused."""
    async with served(calls(a=1, b=2), calls(a="x", b=2), calls(a=1)) as one:
        unmet = [(await one.post(tools=[STRICT])).json()["choices"][0]["unmet"] for _ in range(3)]
    assert unmet[0] == []
    assert [found[0]["param"] for found in unmet[1:]] == ["tools", "tools"]
    assert ".a is not of type" in unmet[1][0]["message"]
    assert 'lacks "b"' in unmet[2][0]["message"]


@pytest.mark.parametrize(
    ("asks", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": 7}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": [1] * 100_000}, None),
        ({"messages": [1] * 100_000}, None),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"enable_thinking": "perhaps"}, "enable_thinking"),
        ({"top_k": 10**30}, "top_k"),
    ],
)
async def test_contradictory_requests_are_refused_by_parameter(
    asks: dict[str, Any], param: str | None
) -> None:
    async with served(options=EndpointOptions(lenient=True, sampling="client")) as one:
        answer = await one.post(**asks)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert param is None or error["param"].startswith(param)
        assert len(answer.text) < 1000
        assert not one.agents.begun


async def test_a_valid_address_says_which_api_is_not_served() -> None:
    async with served() as one:
        root = one.url.removesuffix("/v1")
        for method, url, status, word in [
            ("POST", f"{one.url}/embeddings", 404, "embeddings"),
            ("GET", f"{one.url}/responses/resp_1", 404, "/responses/resp_1 is not served"),
            ("POST", f"{one.url}/messages/batches", 404, "/messages/batches is not served"),
            ("POST", f"{one.url}/v1/messages", 404, "anthropic_url"),
            ("GET", f"{one.url}/threads/x/runs", 404, "Assistants"),
            ("POST", f"{one.url}/something", 404, "/something is not served"),
            ("GET", f"{root}/", 404, "is not served"),
            ("POST", f"{root}/chat/completions", 404, "ends in /v1"),
            ("POST", f"{one.url}/v1/chat/completions", 404, "ends in /v1"),
            ("GET", f"{one.url}/chat/completions", 405, "chat/completions"),
            ("DELETE", f"{one.url}/models/solver", 405, "models"),
        ]:
            answer = await one.http.request(method, url)
            error = answer.json()["error"]
            assert answer.status_code == status, (url, error)
            assert word in error["message"], (url, error)
            assert "POST /chat/completions" in error["message"]
            assert one.url.split("/")[4] not in answer.text, "the address is a secret"
        odd = await one.http.get(f"{one.url}/embeddings", headers={"host": "[::1"})
        assert odd.status_code == 404
        wrong = await one.http.post(one.url.replace("/solver/", "/checker/") + "/responses")
        assert wrong.json()["error"]["code"] == "not_found"
        client = AsyncOpenAI(base_url=one.url, api_key="x", http_client=one.http)
        assert (await client.models.retrieve("solver")).id == "solver"
        # Any model is taken, so any is there.
        assert (await client.models.retrieve("Qwen/Qwen3-8B")).id == "Qwen/Qwen3-8B"


async def test_prompts_are_continued_each_by_itself() -> None:
    async with served("a", "b", "c", "d") as one:
        answer = (await one.post("/completions", prompt=["x", "yz"], n=2)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert sorted(choice["text"] for choice in answer["choices"]) == ["a", "b", "c", "d"]
        assert answer["usage"]["prompt_tokens"] == 3
        single = (await one.post("/completions", prompt=["x"])).json()
        assert len(single["choices"]) == 1
        ids = [list(CHAT.encode("x")), list(CHAT.encode("y"))]
        assert len((await one.post("/completions", prompt=ids)).json()["choices"]) == 2
        for bad in ("", [], [""], ["x", ""], [[]], [["x"]], ["x"] * 200, {"a": 1}, None):
            answer = await one.post("/completions", prompt=bad)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("prompt"), bad


async def test_a_text_that_is_continued_begins_as_the_tokenizer_begins_texts() -> None:
    chat, first = make_beginning_chat()
    async with served("a", chat=chat) as one:
        await one.post("/completions", prompt="xy")
        assert one.script.asked[-1][1] == (first, *chat.encode("xy"))
        await one.post("/completions", prompt=list(chat.encode("xy")))
        assert one.script.asked[-1][1] == chat.encode("xy"), "ids are taken as they are"


async def test_template_arguments_are_taken_in_both_ways() -> None:
    shows = "{% if enable_thinking is false %}quick{% endif %}{{ style }}"
    chat = make_chat(TOOLED + shows)
    script = Script(lambda agent, prompt, sampling: [*chat.encode("ok"), 2])
    server = EndpointServer()
    agents = make_agents(script, chat)
    try:
        _, endpoint = server.open(agents["solver"])
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key="x") as client:
            for extra in (
                {"enable_thinking": False},
                {"chat_template_kwargs": {"enable_thinking": False, "style": "brief"}},
                {"enable_thinking": True},
            ):
                await client.chat.completions.create(model="m", messages=[ASKED], extra_body=extra)
    finally:
        await server.stop()
    ends = [chat.transcript(prompt).rpartition("assistant\n")[2] for _, prompt, _ in script.asked]
    assert ends == ["quick", "quickbrief", ""]


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        ({"a": [1, 2]}, {"properties": {"a": {"items": {"type": "integer"}}}}, ""),
        ({"a": [1, "2"]}, {"properties": {"a": {"items": {"type": "integer"}}}}, ".a[1]"),
        (True, {"type": "integer"}, "type"),
        (1.0, {"type": "integer"}, ""),
        (1.5, {"type": ["integer", "null"]}, "type"),
        (True, {"enum": [1]}, "is not one of"),
        ("b", {"const": "a"}, "is not"),
        (5, {"minimum": 6}, "minimum"),
        ([], {"minItems": 1}, "minItems"),
        ({"b": 1}, {"properties": {}, "additionalProperties": False}, ".b should not"),
        (1, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "anyOf"),
        (1, {"not": {"type": "integer"}}, "should not"),
        (
            {"n": {"n": 1}},
            {
                "$ref": "#/$defs/T",
                "$defs": {"T": {"properties": {"n": {"$ref": "#/$defs/T"}}, "type": "object"}},
            },
            ".n.n",
        ),
        (1, {"$ref": "#"}, ""),
        (1, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, ""),
        (1, {"$ref": "https://example.com/schema"}, ""),
        (1, {"type": 7, "enum": 3, "properties": [], "items": 3, "minimum": "x"}, ""),
        ("aaaa", {"pattern": "(a+)+$b"}, ""),
    ],
)
def test_a_value_that_does_not_match_a_schema_says_where(
    value: Any, schema: dict[str, Any], wrong: str
) -> None:
    said = mismatch(value, schema)
    assert wrong in said
    assert bool(said) == bool(wrong)


def test_checking_a_schema_ends() -> None:
    value: Any = [[[1] * 50] * 50] * 50
    schema: Any = {"type": "integer"}
    for _ in range(12):
        schema = {"anyOf": [{"items": schema}, {"items": {"not": schema}}, schema]}
    assert isinstance(mismatch(value, schema), str)
    deep: Any = {}
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert "cannot be checked" in mismatch(1, deep)
