"""Mistakes of clients, and their effects on a trajectory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.endpoint.stage import ADD, Stage, open_stage
from tests.endpoint.test_endpoint_client import ASKED, COMPLETED, client_of
from tests.support.waiting import until
from troupe.v1 import common_pb2 as common_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hello"}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_messages"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "invalid_messages",
    ),
    (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[1].tool_calls[0]",
        "invalid_messages",
    ),
    (
        {"messages": [ASKED, {"role": "assistant", "content": "hi", "tool_calls": 5}]},
        "messages[1].tool_calls[0]",
        "invalid_messages",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0]", "invalid_messages"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_messages"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 1000}, "n", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_value"),
    ({"logit_bias": {"5": 10}}, "logit_bias", "unsupported_value"),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "unsupported_value"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_value"),
    (
        {"messages": [{"role": "user", "content": "x" * 3000}]},
        "messages",
        "context_length_exceeded",
    ),
]


async def test_a_wrong_request_is_a_400_that_names_the_field(stage: Stage) -> None:
    answers: list[httpx.Response] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        url = agents["solver"].endpoint().base_url + "/chat/completions"
        async with httpx.AsyncClient() as client:
            for changes, _, _ in BAD:
                body = {"model": "m", "messages": [ASKED], **changes}
                answers.append(await client.post(url, json=body))
            body = {"prompt": [10**30]}
            answers.append(await client.post(url.replace("/chat", ""), json=body))
            answers.append(await client.post(url, content=b"{not json"))
            answers.append(await client.post(url, content=b"[" * 100_000))
            answers.append(await client.post(url, json=["a list"]))
            half = b'{"messages": [{"role": "user", "content": "\\uD800"}]}'
            answers.append(await client.post(url, content=half))
        return {"solver": 0.0}

    event = await stage.play(act)

    assert event.state == COMPLETED, event.reason
    assert not event.turns, "nothing wrong is a turn"
    for answer, (changes, param, code) in zip(answers, BAD, strict=False):
        error = answer.json()["error"]
        assert answer.status_code == 400, (changes, error)
        assert (error["param"], error["code"]) == (param, code), (changes, error)
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 500
        assert answer.headers["x-should-retry"] == "false"
    odd_ids = answers.pop(len(BAD))
    assert (odd_ids.status_code, odd_ids.json()["error"]["param"]) == (400, "token_ids")
    for answer in answers[len(BAD) :]:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


async def test_a_lenient_endpoint_leaves_promises_to_the_model(stage: Stage) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents, lenient=True) as client:
            answer = await client.chat.completions.create(
                model="m",
                messages=[ASKED],
                tools=[ADD],
                tool_choice="required",
                parallel_tool_calls=False,
                response_format={"type": "json_object"},
            )
            assert answer.choices[0].message.content == "ok"
            with pytest.raises(openai.BadRequestError, match="logit_bias"):
                await client.chat.completions.create(
                    model="m", messages=[ASKED], logit_bias={"5": 1}
                )
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason


async def test_only_the_address_of_a_running_trajectory_is_served(stage: Stage) -> None:
    kept: dict[str, str] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        endpoint = agents["solver"].endpoint()
        assert agents["solver"].endpoint() == endpoint
        assert agents["checker"].endpoint().base_url != endpoint.base_url
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        kept["url"] = endpoint.base_url
        await agents["solver"].chat("hello")
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    root = kept["url"].partition("/t/")[0]
    body = {"model": "m", "messages": [ASKED]}
    async with httpx.AsyncClient() as client:
        wrong = [
            await client.post(kept["url"] + "/chat/completions", json=body),  # it has ended
            await client.post(f"{root}/t/guess/solver/v1/chat/completions", json=body),
            await client.post(
                kept["url"].replace("/solver/", "/critic/") + "/chat/completions", json=body
            ),
            await client.get(kept["url"] + "/models"),
            await client.get(f"{root}/"),
            await client.get(f"{root}/v1/models"),
        ]
        method = await client.get(kept["url"] + "/chat/completions")
    assert {answer.status_code for answer in wrong} == {404}
    assert len({answer.text for answer in wrong}) == 1, "nothing tells which of them it was"
    assert wrong[0].json()["error"]["code"] == "not_found"
    assert method.status_code == 405


async def test_a_body_that_is_too_large_is_refused(stage: Stage) -> None:
    answers: list[httpx.Response] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        url = agents["solver"].endpoint().base_url + "/chat/completions"
        message = {"role": "user", "content": "x" * (17 << 20)}
        async with httpx.AsyncClient() as client:
            answers.append(await client.post(url, json={"messages": [message]}))
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    assert answers[0].status_code == 413
    assert answers[0].json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_turn_with_it(stage: Stage, stream: bool) -> None:
    stage.script.hold = asyncio.Event()

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(
                    model="m", messages=[ASKED], stream=stream, timeout=0.3
                )
            assert len(stage.script.asked) == 1
            await until(lambda: stage.script.aborted)
            stage.script.hold.set()
            await client.chat.completions.create(model="m", messages=[ASKED])
        return {"solver": 1.0}

    event, rows = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert len(event.turns) == 1
    assert len(rows) == 1, "the aborted turn is not trained"


async def test_the_end_of_a_trajectory_ends_its_calls(stage: Stage) -> None:
    stage.script.hold = asyncio.Event()
    raised: list[BaseException] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        client = client_of(agents)

        async def left_behind() -> None:
            try:
                await client.chat.completions.create(model="m", messages=[ASKED])
            except openai.NotFoundError as error:
                raised.append(error)

        query.data["left"] = asyncio.create_task(left_behind())
        await until(lambda: stage.script.asked)
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    await until(lambda: raised)
    assert not event.turns


async def test_a_turn_that_is_late_says_so(tmp_path: Path) -> None:
    async with open_stage(tmp_path, limits={"turn_seconds": 0.2}) as stage:
        stage.script.hold = asyncio.Event()

        async def act(query: Any, agents: Any) -> dict[str, float]:
            async with client_of(agents) as client:
                await client.chat.completions.create(model="m", messages=[ASKED])
            return {"solver": 0.0}

        event = await stage.play(act)
    assert event.state == common_pb.TRAJECTORY_STATE_FAILED
    assert "workflow_raised" in event.reason
    assert "within 0.2 s" in event.reason


@pytest.mark.parametrize(
    ("opens", "speaks", "rewards", "unused"),
    [
        (True, False, True, True),
        (True, True, True, False),
        (False, False, True, False),
        (True, False, False, False),
    ],
)
async def test_a_trajectory_that_was_rewarded_for_what_others_said_is_known(
    stage: Stage, opens: bool, speaks: bool, rewards: bool, unused: bool
) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        if opens:
            agents["solver"].endpoint()
        if speaks:
            await agents["solver"].chat("hi")
        return {"solver": 1.0} if rewards else {}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    assert event.metrics.get("endpoint_unused", 0.0) == float(unused)
