"""The official client against agents of a running trajectory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.endpoint.stage import ADD, Stage, calls, in_turn, says, text_of
from tests.support.waiting import until
from troupe.functions.library.judge import judge
from troupe.v1 import common_pb2 as common_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = {"role": "user", "content": "what is 3+4?"}


def client_of(agents: Any, agent: str = "solver", **options: Any) -> AsyncOpenAI:
    endpoint = agents[agent].endpoint(**options)
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def test_a_tool_round_trip_is_trained_as_it_was_sampled(stage: Stage) -> None:
    asks = "I ask. " + calls(a=3, b=4)  # "add" inside is spelled with unusual tokens
    stage.script.speak = in_turn(says(asks), says("it is 7"))
    seen: dict[str, Any] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            first = await client.chat.completions.create(
                model="gpt-4o", messages=[ASKED], tools=[ADD]
            )
            message = first.choices[0].message
            seen["first"] = first
            answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
            history = [ASKED, message.model_dump(exclude_none=True), answer]
            seen["second"] = await client.chat.completions.create(
                model="gpt-4o", messages=history, tools=[ADD]
            )
        return {"solver": 1.5}

    event, [one, two] = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    first, second = seen["first"], seen["second"]
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content == "I ask."
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
    assert second.choices[0].message.content == "it is 7"
    assert second.choices[0].finish_reason == "stop"

    assert one.response == says(asks)
    assert two.prompt[: len(one.prompt + one.response)] == one.prompt + one.response, (
        "the sampled ids, not new ones"
    )
    assert text_of(two.prompt).endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert two.response == says("it is 7")
    assert one.logprobs == [round(-n / 10, 4) for n in range(1, len(one.response) + 1)]
    assert [one.reward, two.reward] == [1.5, 1.5]
    assert first.usage.prompt_tokens == len(one.prompt)
    assert first.usage.completion_tokens == len(one.response)
    assert event.metrics["prefix_breaks"] == 0
    assert [t.agent for t in event.turns] == ["solver", "solver"]


async def test_streams_carry_the_same_as_whole_responses(stage: Stage) -> None:
    stage.script.speak = in_turn(says("one two"), says(calls(a=1, b=2) + calls(a=3, b=4)))
    seen: dict[str, Any] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            chunks = await client.chat.completions.create(
                model="m",
                messages=[ASKED],
                stream=True,
                stream_options={"include_usage": True},
            )
            seen["text"] = [chunk async for chunk in chunks]
            async with client.chat.completions.stream(
                model="m", messages=[ASKED], tools=[ADD]
            ) as stream:
                seen["calls"] = await stream.get_final_completion()
        return {"solver": 0.0}

    event = await stage.play(act)

    assert event.state == COMPLETED, event.reason
    chunks = seen["text"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "one two"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(says("one two"))
    assert len({c.id for c in chunks}) == 1
    choice = seen["calls"].choices[0]
    assert choice.finish_reason == "tool_calls"
    made = [json.loads(c.function.arguments) for c in choice.message.tool_calls]
    assert made == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert len({c.id for c in choice.message.tool_calls}) == 2


async def test_a_synchronous_framework_runs_in_a_thread(stage: Stage) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        endpoint = agents["checker"].endpoint()

        def framework() -> str | None:
            with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                assert [m.id for m in client.models.list()] == ["checker"]
                said = client.completions.create(model="m", prompt="say", max_tokens=1)
                assert said.choices[0].finish_reason == "length"
                assert said.usage.completion_tokens == 1
                answer = client.chat.completions.create(model="m", messages=[ASKED])
                return answer.choices[0].message.content

        assert await asyncio.to_thread(framework) == "ok"
        return {"checker": 1.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    assert [t.agent for t in event.turns] == ["checker"] * 2


async def test_a_client_s_sampling_options_apply_and_are_reported(stage: Stage) -> None:
    stage.script.speak = in_turn(says("abc##def"), says("abc"))
    seen: dict[str, Any] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents, sampling="client") as client:
            seen["cut"] = await client.chat.completions.create(
                model="m",
                messages=[ASKED],
                stop=["##", "zz"],
                temperature=0.5,
                top_p=0.9,
                seed=-1,
                logprobs=True,
                user="ignored",
                extra_body={"return_token_ids": True, "top_k": 5},
            )
            history = [ASKED, {"role": "assistant", "content": "abc"}, ASKED]
            seen["three"] = await client.chat.completions.create(
                model="m", messages=history, n=3, max_completion_tokens=7
            )
            seen["turns"] = agents.begun
        return {"solver": 0.0}

    event = await stage.play(act)

    assert event.state == COMPLETED, event.reason
    cut = seen["cut"].choices[0]
    assert (cut.message.content, cut.finish_reason) == ("abc", "stop")
    # The policy sampled the stop string, which is trained; nothing after it was sampled.
    assert cut.token_ids == says("abc##")[:-1]
    assert [entry.token for entry in cut.logprobs.content] == list("abc##")
    assert [entry.logprob for entry in cut.logprobs.content] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    first, *others = seen["turns"]
    assert first.sampling.temperature == 0.5
    assert (first.sampling.top_p, first.sampling.top_k) == (0.9, 5)
    assert 0 <= first.sampling.seed < 2**31
    assert [c.index for c in seen["three"].choices] == [0, 1, 2]
    assert len({turn.sampling.seed for turn in others}) == 3, "each with a seed of its own"
    assert {turn.sampling.max_new_tokens for turn in others} == {7}
    prompt = seen["cut"].prompt_token_ids
    assert list(others[0].prompt_ids[: len(prompt) + 5]) == prompt + says("abc##")[:-1]
    assert event.metrics["prefix_breaks"] == 0


async def test_an_edited_history_is_read_anew_and_counted(stage: Stage) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            await client.chat.completions.create(model="m", messages=[ASKED])
            for said in ("ok", "no"):
                history = [ASKED, {"role": "assistant", "content": said}, ASKED]
                await client.chat.completions.create(model="m", messages=history)
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    assert event.metrics["prefix_breaks"] == 1


async def test_tool_choice_none_leaves_calls_as_text(stage: Stage) -> None:
    stage.script.speak = in_turn(says(calls(a=1, b=2)))

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:
            answer = await client.chat.completions.create(
                model="m", messages=[ASKED], tools=[ADD], tool_choice="none"
            )
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].message.content == calls(a=1, b=2)
            assert answer.choices[0].finish_reason == "stop"
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason


async def test_concurrent_calls_are_turns_of_their_own(stage: Stage) -> None:
    async def act(query: Any, agents: Any) -> dict[str, float]:
        async with client_of(agents) as client:

            async def ask(number: int) -> Any:
                messages = [{"role": "user", "content": f"number {number}"}]
                return await client.chat.completions.create(model="m", messages=messages)

            stage.script.hold = asyncio.Event()
            asking = [asyncio.create_task(ask(number)) for number in range(8)]
            await until(lambda: len(stage.script.asked) == 8)  # before one of them ends
            stage.script.hold.set()
            answers = await asyncio.gather(*asking)
        assert [a.choices[0].message.content for a in answers] == ["ok"] * 8
        return {"solver": 0.0}

    event = await stage.play(act)
    assert event.state == COMPLETED, event.reason
    assert len(event.turns) == 8


async def test_the_ready_judge_asks_an_agent_of_ours(stage: Stage) -> None:
    stage.script.speak = in_turn(says('{"reason": "so", "score": 3}'))
    seen: list[Any] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        endpoint = agents["solver"].endpoint()
        shown = {"data": {"question": "3+4"}}
        turns = [{"agent": "solver", "response": "7"}]
        at = {"base_url": endpoint.base_url, "model": endpoint.model, "prompt": "$task $answer?"}
        seen.append(await asyncio.to_thread(judge, shown, turns, {}, highest=4.0, **at))
        return {"solver": 1.0}

    event, [row] = await stage.train(act)

    assert event.state == COMPLETED, event.reason
    assert seen == [0.75]
    assert "7?" in text_of(row.prompt)
