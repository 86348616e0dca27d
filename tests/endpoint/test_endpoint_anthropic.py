"""Anthropic's Messages API: the official client, an agent over it, and requests by hand."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

from tests.endpoint.stage import TOOLED, Stage, calls, in_turn, says, text_of
from tests.endpoint.test_endpoint_client import COMPLETED
from tests.endpoint.test_endpoint_framework import assistant
from tests.endpoint.test_endpoint_requests import CHAT, LENIENT, SCHEMA, THOUGHT, Served, served
from tests.endpoint.test_endpoint_responses import SAID, are_sampled_ids
from tests.workflow.stage import make_chat
from troupe.workflow import TurnError

pytestmark = pytest.mark.asyncio(loop_scope="module")
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two integers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
ASKED: dict[str, Any] = {"role": "user", "content": "3 + 4?"}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def client_of(agents: Any, **options: Any) -> AsyncAnthropic:
    endpoint = agents["solver"].endpoint(**options)
    return AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.api_key, max_retries=0)


def client_at(one: Served) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=one.url.removesuffix("/v1"), api_key="x")


async def loop(client: AsyncAnthropic, messages: list[Any], *, streams: bool) -> str:
    """An agent as such agents are written: tools are called until the model calls none."""
    while True:
        asked: Any = {
            "model": "claude-opus-5",
            "max_tokens": 4096,
            "system": [
                {"type": "text", "text": "You add.", "cache_control": {"type": "ephemeral"}}
            ],
            "tools": [ADD],
            "messages": messages,
        }
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": str(block.input["a"] + block.input["b"])}],
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        if message.stop_reason != "tool_use":
            return message.content[-1].text
        messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_over_the_client_is_trained_on_the_sampled_ids(
    stage: Stage, streams: bool
) -> None:
    stage.script.speak = in_turn(*(says(text) for text in SAID))
    outputs: list[str] = []
    messages: list[Any] = [{"role": "user", "content": "3 + 4 + 42?"}]

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            outputs.append(await loop(client, messages, streams=streams))
            messages.append({"role": "user", "content": [{"type": "text", "text": "and 1 + 1?"}]})
            outputs.append(await loop(client, messages, streams=streams))
        return {"solver": 2.0}

    event, rows = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert outputs == ["It is 49.", "Added: 2."]
    assert event.metrics["prefix_breaks"] == 0
    are_sampled_ids(rows, SAID)
    kinds = [block.type for block in messages[1]["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    last = text_of(rows[-1].prompt)
    assert "You add." in last
    assert '"description": "Add two integers."' in last
    assert last.count("<tool_response>\n42\n</tool_response>") == 1


async def test_a_framework_with_an_anthropic_model_is_trained_unchanged(stage: Stage) -> None:
    texts = [
        SAID[0].replace(
            '"add", "arguments": {"a": 1, "b": 41}', '"double", "arguments": {"number": 21}'
        ),
        "It is 49.",
        "42.",
    ]
    stage.script.speak = in_turn(*(says(text) for text in texts))
    outputs: list[str] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            model = AnthropicModel("any", provider=AnthropicProvider(anthropic_client=client))
            first = await assistant.run("3 + 4 + 2 * 21?", model=model)
            async with assistant.run_stream(
                "less 7?", model=model, message_history=first.all_messages()
            ) as second:
                outputs.extend((first.output, await second.get_output()))
        return {"solver": 1.0}

    event, rows = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert outputs == ["It is 49.", "42."]
    assert event.metrics["prefix_breaks"] == 0
    are_sampled_ids(rows, texts)


async def post(one: Served, path: str = "/messages", **body: Any) -> Any:
    return await one.post(path, **{"model": "m", "max_tokens": 99, "messages": [ASKED], **body})


async def test_a_stream_carries_the_same_as_a_whole_message() -> None:
    async with served(f"{THOUGHT}So.{calls(a=1, b=2)}") as one, client_at(one) as client:
        asked: Any = {"model": "m", "max_tokens": 500, "messages": [ASKED], "tools": [ADD]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream if not event.type.startswith("content")]
            final = await stream.get_final_message()
    apart = {"id", "content"}
    assert whole.model_dump(exclude=apart) == final.model_dump(exclude=apart)
    for message in (whole, final):
        thoughts, text, call = message.content
        assert (thoughts.type, thoughts.thinking) == ("thinking", THOUGHT[7:-8])
        assert thoughts.signature
        assert text.text == "So."
        assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
        assert message.stop_reason == "tool_use"
    assert whole.content[2].id != final.content[2].id
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


async def test_how_a_reply_ends_is_said_in_the_terms_of_this_api() -> None:
    async with served("one##two", "done", options=LENIENT) as one:
        stopped = (await post(one, stop_sequences=["zz", "##"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "##")
        assert stopped["content"] == [{"type": "text", "text": "one"}]
        one.script.speak = lambda *_: [*CHAT.encode("cut")]
        cut = (await post(one, max_tokens=3, return_token_ids=True)).json()
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        assert cut["usage"]["output_tokens"] == len(cut["token_ids"])
        one.script.speak = lambda *_: [*CHAT.encode("done"), 2]
        done = (await post(one, max_tokens=100_000, stop_sequences=["##"])).json()
        assert (done["stop_reason"], done["stop_sequence"]) == ("end_turn", None)
        limits = [sampling.max_new_tokens for _, _, sampling in one.script.asked]
        assert limits == [32, 3, 32], "the agent's own is not exceeded"


async def test_results_of_tools_precede_the_user_s_text() -> None:
    said = f"{THOUGHT}So.{calls(a=1, b=2)}"
    async with served("ok") as one:
        one.script.speak = lambda *_: [*CHAT.encode(said), 2]
        first = (await post(one, tools=[ADD])).json()
        [call] = [block for block in first["content"] if block["type"] == "tool_use"]
        answer = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": "3",
            "is_error": True,
        }
        later = {"role": "user", "content": [answer, {"type": "text", "text": "and?"}]}
        system = {"role": "system", "content": "Be brief."}
        for content in (first["content"], first["content"][1:], first["content"][2:]):
            history = [ASKED, {"role": "assistant", "content": content}, later, system]
            answered = await post(one, tools=[ADD], messages=history)
            assert answered.status_code == 200, answered.text
            assert not one.agents.begun[-1].prefix_broken
            assert one.prompt().startswith(CHAT.transcript(one.script.asked[0][1]) + said)
            assert one.prompt().partition(said)[2] == (
                "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
                "<|im_start|>user\nand?<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
                "<|im_start|>assistant\n"
            )


async def test_tokens_are_counted_without_a_turn() -> None:
    async with served("ok") as one:
        asked = {"system": "You add.", "tools": [ADD]}
        counted = await post(one, "/messages/count_tokens", **asked)
        assert counted.status_code == 200, counted.text
        assert not one.agents.begun
        made = (await post(one, **asked)).json()
        assert counted.json() == {"input_tokens": made["usage"]["input_tokens"]}


async def test_thinking_is_an_argument_of_the_template() -> None:
    shows = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    async with served(chat=make_chat(TOOLED + shows)) as one:
        for thinking, shown in [
            ({"type": "enabled", "budget_tokens": 1024}, "True"),
            ({"type": "disabled"}, "False"),
            ({"type": "adaptive"}, ""),
        ]:
            assert (await post(one, thinking=thinking)).status_code == 200
            assert one.prompt().endswith(f"assistant\n{shown}")


async def test_requests_that_need_constrained_decoding_are_refused_in_the_form_of_the_api() -> None:
    async with served() as one:
        for asks, param in [
            ({"output_config": FORMAT}, "output_config.format"),
            ({"output_format": FORMAT["format"]}, "output_config.format"),
            ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
            (
                {
                    "tools": [ADD],
                    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                },
                "tool_choice.disable_parallel_tool_use",
            ),
        ]:
            body = (await post(one, **asks)).json()
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["param"] == param
            assert f"`{param}`" in body["error"]["message"]
            assert "lenient=True" in body["error"]["message"]
    async with served("nothing", options=LENIENT) as one:
        body = (await post(one, tools=[ADD], tool_choice={"type": "any"})).json()
        assert body["unmet"] == [{"param": "tool_choice", "message": "it calls nothing"}]
        assert "calling at least one" in one.prompt()
        streamed = await post(one, tools=[ADD], tool_choice={"type": "any"}, stream=True)
        assert "it calls nothing" in streamed.text.split("\n\n")[-3]
        none = {"tools": [ADD], "tool_choice": {"type": "none"}}
        assert (await post(one, **none)).json()["stop_reason"] == "end_turn"


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (block(type="image", source={}), "messages[0].content[0]"),
    (block(type="text"), "messages[0].content[0]"),
    (
        block(type="tool_result", content=[{"type": "image"}]),
        "messages[0].content[0].content[0]",
    ),
    (block(type="tool_use", name="add", input="{}"), "messages[0].content[0]"),
    ({"messages": [ASKED, {"role": "assistant", "content": "It is"}]}, "messages[1]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [1]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 40}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, "tools[0]"),
    ({"tools": [{**ADD, "input_schema": {"properties": 3}}]}, "tools[0].input_schema"),
    ({"tools": [ADD], "tool_choice": {"type": "most"}}, "tool_choice.type"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
]


async def test_a_wrong_request_names_the_field_of_this_api() -> None:
    async with served() as one:
        for asks, param in WRONG:
            answer = await post(one, **asks)
            body = answer.json()
            assert answer.status_code == 400, body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert body["error"]["param"].startswith(param), body
            assert len(answer.text) < 1000
            counted = await post(one, "/messages/count_tokens", **asks)
            assert counted.json()["error"]["param"] == body["error"]["param"]
        assert not one.agents.begun


FAILED: list[tuple[Exception, int, str]] = [
    (TurnError("late", kind="deadline"), 504, "timeout_error"),
    (TurnError("gone", kind="job_released"), 404, "not_found_error"),
    (TurnError("no", kind="non_finite_logits"), 500, "api_error"),
    (ZeroDivisionError("ours"), 500, "api_error"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_turn_is_an_error_of_the_client_and_not_asked_for_again(
    stream: bool,
) -> None:
    left = [error for error, _, _ in FAILED]

    def fails(agent: str, prompt: Any, sampling: Any) -> list[int]:
        raise left.pop(0)

    slow = 0.1 * stream
    async with served(delay=lambda number: slow, keep_alive=0.02) as one, client_at(one) as client:
        one.script.speak = fails
        for asked, (_, status, kind) in enumerate(FAILED, 1):
            asks: Any = {"model": "m", "max_tokens": 9, "messages": [ASKED], "stream": stream}
            with pytest.raises(anthropic.APIStatusError) as caught:
                [_ async for _ in await client.messages.create(**asks)]
            assert len(one.script.asked) == asked
            assert caught.value.body["error"]["type"] == kind
            assert stream or caught.value.status_code == status


async def test_wrong_addresses_are_one_404_in_the_shape_of_this_api(stage: Stage) -> None:
    kept: dict[str, str] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        kept["url"] = agents["solver"].endpoint().anthropic_url
        async with client_of(agents) as client:
            assert [model.id async for model in client.models.list()] == ["solver"]
            assert (await client.models.retrieve("solver")).display_name == "solver"
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    root = kept["url"].partition("/t/")[0]
    bodies = []
    for url in (
        kept["url"],
        f"{root}/t/guess/solver",
        kept["url"].replace("/solver", "/critic"),
        root,
    ):
        async with AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.create(model="m", max_tokens=9, messages=[ASKED])
        bodies.append(caught.value.body)
    assert bodies[0]["error"]["type"] == "not_found_error"
    assert all(body == bodies[0] for body in bodies), "nothing tells which of them it was"
