"""An existing agent framework (Pydantic AI), as it is, against a running trajectory."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.endpoint.stage import Stage, calls, in_turn, says, text_of
from troupe.v1 import common_pb2 as common_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

# An agent as its author wrote it: nothing of it knows Troupe.
assistant = Agent(instructions="You add with your tools.")


@assistant.tool_plain
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@assistant.tool_plain
def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def model_of(agents: Any, name: str) -> OpenAIChatModel:
    endpoint = agents[name].endpoint()
    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    return OpenAIChatModel(endpoint.model, provider=provider)


# "add" is spelled letter by letter, as the tokenizer would never write it.
SAID = [
    "I use both. " + calls("add", a=3, b=4) + calls("double", number=21),
    "Once more. " + calls("add", a=7, b=42),
    "It is 49.",
    calls("add", a=1, b=1),
    "Added: 2.",
]


async def test_a_conversation_with_tools_is_trained_on_the_sampled_ids(stage: Stage) -> None:
    stage.script.speak = in_turn(*(says(text) for text in SAID))
    outputs: list[str] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        model = model_of(agents, "solver")
        first = await assistant.run("3 + 4 + 2 * 21?", model=model)
        history = first.all_messages()
        second = await assistant.run("and 1 + 1?", model=model, message_history=history)
        outputs.extend((first.output, second.output))
        return {"solver": 2.0}

    event, rows = await stage.train(act)

    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    assert outputs == ["It is 49.", "Added: 2."]
    assert event.metrics["prefix_breaks"] == 0
    assert [row.response for row in rows] == [says(text) for text in SAID]
    for (prompt, response, logprobs, reward), (later, *_) in pairwise(rows):
        assert later[: len(prompt + response)] == prompt + response
        assert logprobs == [round(-n / 10, 4) for n in range(1, len(response) + 1)]
        assert reward == 2.0
    last = text_of(rows[-1].prompt)
    assert last.startswith("<|im_start|>system\n{")  # the tools
    assert "<tool_response>\n7\n</tool_response>" in last
    assert "<tool_response>\n42\n</tool_response>" in last
    assert "You add with your tools." in last


async def test_a_framework_streams_and_runs_in_its_own_thread(stage: Stage) -> None:
    stage.script.speak = in_turn(says(calls("add", a=3, b=4)), says("7"), says("7"))

    async def act(query: Any, agents: Any) -> dict[str, float]:
        model = model_of(agents, "solver")
        async with assistant.run_stream("3 + 4?", model=model) as result:
            assert await result.get_output() == "7"
        endpoint = agents["checker"].endpoint()

        def elsewhere() -> str:
            provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
            model = OpenAIChatModel("any name", provider=provider)
            return assistant.run_sync("is it 7?", model=model).output

        assert await asyncio.to_thread(elsewhere) == "7"
        return {"solver": 1.0, "checker": 1.0}

    event = await stage.play(act)
    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    assert [turn.agent for turn in event.turns] == ["solver", "solver", "checker"]
