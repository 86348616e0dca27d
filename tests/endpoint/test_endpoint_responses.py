"""OpenAI's Responses API: the official client, the OpenAI Agents SDK, and requests by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.endpoint.stage import Stage, calls, in_turn, says, text_of
from tests.endpoint.test_endpoint_client import ASKED, COMPLETED, client_of
from tests.endpoint.test_endpoint_requests import LENIENT, SCHEMA, THOUGHT, Served, served
from troupe.workflow import TurnError

pytestmark = pytest.mark.asyncio(loop_scope="module")
set_tracing_disabled(True)
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two integers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "A", "schema": SCHEMA, "strict": True}}
# "add" is spelled letter by letter, as the tokenizer would never write it.
SAID = [
    "<think>Both, I add.</think>I use both. " + calls("add", a=3, b=4) + calls("add", a=1, b=41),
    "Once more. " + calls("add", a=7, b=42),
    "It is 49.",
    calls("add", a=1, b=1),
    "Added: 2.",
]


@function_tool
def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: One.
        b: Another.
    """
    return str(a + b)


def are_sampled_ids(rows: Any, texts: list[str]) -> None:
    """Every response is in the next prompt, and each prompt begins with the previous one."""
    assert [row.response for row in rows] == [says(text) for text in texts]
    for (prompt, response, *_), (later, *_) in pairwise(rows):
        assert later[: len(prompt + response)] == prompt + response


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("keeps", ["input", "previous_response_id"])
async def test_the_agents_sdk_trains_with_its_default_model(
    stage: Stage, streams: bool, keeps: str
) -> None:
    stage.script.speak = in_turn(*(says(text) for text in SAID))
    outputs: list[str] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            model = OpenAIResponsesModel("any", openai_client=client)
            agent = Agent("adder", instructions="You add.", tools=[add], model=model)
            settings = ModelSettings(include_usage=True, store=keeps != "input")
            config = RunConfig(model_settings=settings)

            async def run(given: Any, **options: Any) -> Any:
                if not streams:
                    return await Runner.run(agent, given, run_config=config, **options)
                result = Runner.run_streamed(agent, given, run_config=config, **options)
                async for _ in result.stream_events():
                    pass
                return result

            if keeps == "input":
                first = await run("3 + 4 + 42?")
                second = await run(
                    [*first.to_input_list(), {"role": "user", "content": "and 1 + 1?"}]
                )
            else:
                first = await run("3 + 4 + 42?", auto_previous_response_id=True)
                second = await run("and 1 + 1?", previous_response_id=first.last_response_id)
            outputs.extend((first.final_output, second.final_output))
        return {"solver": 2.0}

    event, rows = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert outputs == ["It is 49.", "Added: 2."]
    assert event.metrics["prefix_breaks"] == 0
    are_sampled_ids(rows, SAID)
    last = text_of(rows[-1].prompt)
    assert "You add." in last
    assert '"description": "Add two integers."' in last
    assert last.count("<tool_response>\n42\n</tool_response>") == 1
    assert last.count("<tool_response>\n49\n</tool_response>") == 1


async def test_a_response_has_thoughts_text_and_calls_as_items(stage: Stage) -> None:
    text = f"<think>Hm.</think>So.{calls(a=1, b=2)}{calls(a=3, b=4)}"
    stage.script.speak = in_turn(says(text), says(text), says("seven"), says("cut"))
    seen: dict[str, Any] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            seen["whole"] = whole = await client.responses.create(
                model="m", input="3+4?", tools=[ADD], metadata={"a": "b"}, instructions="Add."
            )
            asked: Any = {"model": "m", "input": "3+4?", "tools": [ADD], "instructions": "Add."}
            async with client.responses.stream(**asked) as stream:
                seen["events"] = [event async for event in stream]
                seen["final"] = await stream.get_final_response()
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
                for item in whole.output
                if item.type == "function_call"
            ]
            seen["next"] = await client.responses.create(
                model="m",
                input=results,
                tools=[ADD],
                instructions="Add.",
                previous_response_id=whole.id,
                include=["message.output_text.logprobs"],
            )
            seen["cut"] = await client.responses.create(
                model="m", input=[ASKED], max_output_tokens=2, extra_body={"return_token_ids": True}
            )
        return {"solver": 1.0}

    event, rows = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert event.metrics["prefix_breaks"] == 0
    whole, final = seen["whole"], seen["final"]
    for response in (whole, final):
        thoughts, message, *made = response.output
        assert thoughts.content[0].text == "Hm."
        assert (response.output_text, message.status) == ("So.", "completed")
        assert [json.loads(one.arguments) for one in made] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert len({one.call_id for one in made} | {one.id for one in response.output}) == 6
        assert response.status == "completed"
        assert response.instructions == "Add."
        assert response.tools[0].name == "add"
        assert response.usage.output_tokens == len(says(text))
    assert whole.metadata == {"a": "b"}
    kinds = [event.type.removeprefix("response.") for event in seen["events"]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(*call, "output_item.done", *call, "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in seen["events"]] == list(range(len(kinds)))
    _, _, after, _ = rows
    assert after.prompt[: len(rows[0].prompt + rows[0].response)] == (
        rows[0].prompt + rows[0].response
    )
    entries = seen["next"].output[0].content[0].logprobs
    assert [entry.token for entry in entries][:5] == list("seven")
    assert seen["cut"].status == "incomplete"
    assert seen["cut"].incomplete_details.reason == "max_output_tokens"
    assert seen["cut"].token_ids == says("cut")[:2]


async def post(one: Served, **body: Any) -> Any:
    return await one.post("/responses", **{"model": "m", "input": "hi", **body})


async def test_items_come_back_whole_by_reference_or_without_thoughts() -> None:
    text = f"{THOUGHT}So."
    async with served(text, "ok") as one:
        first = (await post(one)).json()
        user = {"role": "user", "content": [{"type": "input_text", "text": "on"}]}
        asked = {"role": "user", "content": "hi"}
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        for earlier in (first["output"], references, first["output"][1:]):
            answer = await post(one, input=[asked, *earlier, user], store=False)
            assert answer.status_code == 200, answer.text
            assert not one.agents.begun[-1].prefix_broken
            length = len(one.script.asked[0][1])
            assert one.script.asked[-1][1][: length + 3] == (
                *one.script.asked[0][1],
                *one.agents.begun[0].reply.token_ids[:3],
            )
        assert len({ids for _, ids, _ in one.script.asked[1:]}) == 1
        unstored = answer.json()["id"]
        for previous in (unstored, "resp_guess"):
            wrong = await post(one, previous_response_id=previous)
            assert wrong.status_code == 400
            assert wrong.json()["error"]["code"] == "previous_response_not_found"
            assert wrong.json()["error"]["param"] == "previous_response_id"


async def test_requests_that_need_constrained_decoding_are_refused_in_the_form_of_the_api() -> None:
    async with served() as one:
        for asks, param in [
            ({"text": TEXT_FORMAT}, "text.format"),
            ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
            ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ]:
            error = (await post(one, **asks)).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_value", param)
            assert f"`{param}`" in error["message"]
            assert "lenient=True" in error["message"]
    async with served('{"answer": "x"}', options=LENIENT) as one:
        body = (await post(one, text=TEXT_FORMAT, instructions="Brief.")).json()
        assert [unmet["param"] for unmet in body["unmet"]] == ["text.format"]
        assert one.agents.begun[0].reply.unmet == ("text.format",)
        assert "Brief." in one.prompt()
        assert '"required": ["answer", "why"]' in one.prompt()
        streamed = await post(one, text=TEXT_FORMAT, stream=True)
        last = json.loads(streamed.text.strip().rpartition("data: ")[2])
        assert last["response"]["unmet"] == body["unmet"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "add"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
    ({"input": [{"id": {}}]}, "input[0].id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{**ADD, "parameters": {"properties": 3}}]}, "tools[0].parameters"),
    ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"n": 2}, "n"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
]


async def test_a_wrong_request_names_the_field_of_this_api() -> None:
    async with served() as one:
        for asks, param in WRONG:
            answer = await post(one, **asks)
            error = answer.json()["error"]
            assert answer.status_code == 400, error
            assert error["param"].startswith(param), error
            assert len(answer.text) < 1000
        assert not one.agents.begun


async def test_a_failed_turn_is_the_last_event_of_its_stream() -> None:
    def fails(agent: str, prompt: Any, sampling: Any) -> list[int]:
        raise TurnError("no engine", kind="deadline")

    async with served(delay=lambda number: 0.2, keep_alive=0.05) as one:
        one.script.speak = fails
        client = AsyncOpenAI(base_url=one.url, api_key="x", http_client=one.http, max_retries=0)
        stream = await client.responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="no engine") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "deadline"


async def test_the_context_that_is_left_is_named_as_input(stage: Stage) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="x" * 3000)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "input"
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
