"""Agents, replies and their record."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.workflow.stage import Script, make_agents, make_chat
from troupe.workflow import (
    InvalidMessagesError,
    InvalidRewardError,
    Sampling,
    TurnError,
    UnknownAgentError,
)

CHAT = make_chat()


def echo(agent: str, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    return [*CHAT.encode(f"{agent} {sampling.seed}"), 2]


async def test_chat_returns_a_reply_and_records_the_turn() -> None:
    agents = make_agents(Script(echo))
    reply = await agents["solver"].chat("3+4", temperature=0.5, seed=1)
    assert reply.text == "solver 1"
    assert (reply.agent, reply.turn, reply.finish_reason) == ("solver", 0, "stop")
    assert reply.token_ids[-1] == 2
    assert len(reply.logprobs) == len(reply.token_ids)
    assert reply.message == {"role": "assistant", "content": "solver 1"}
    [turn] = agents.turns
    assert turn.reply is reply
    assert turn.messages == (("user", "3+4"),)
    assert agents.backend.asked[0][2] == Sampling(temperature=0.5, max_new_tokens=32, seed=1)  # type: ignore[attr-defined]


async def test_a_reply_can_be_given_as_a_message() -> None:
    script = Script(echo)
    agents = make_agents(script)
    first = await agents["solver"].chat("3+4", seed=1)
    await agents["solver"].chat([{"role": "user", "content": "3+4"}, first, _user("sure?")])
    prompt = script.asked[1][1]
    assert prompt[: len(first.prompt_ids + first.token_ids)] == first.prompt_ids + first.token_ids


async def test_concurrent_branches_are_numbered_as_written_whichever_ends_first() -> None:
    agents = make_agents(Script(echo, delay=lambda n: 0.02 - 0.005 * n))
    replies = await asyncio.gather(*(agents["solver"].chat(f"branch {b}") for b in range(4)))
    assert [r.turn for r in replies] == [0, 1, 2, 3]
    assert [t.number for t in agents.turns] == [0, 1, 2, 3]
    assert [t.messages[0][1] for t in agents.turns] == [f"branch {b}" for b in range(4)]


async def test_numbers_are_per_agent() -> None:
    agents = make_agents(Script(echo))
    for name, number in [("solver", 0), ("checker", 0), ("solver", 1), ("checker", 1)]:
        assert (await agents[name].chat("x")).turn == number
    assert [turn.position for turn in agents.turns] == [0, 1, 2, 3]


async def test_seeds_of_turns_do_not_depend_on_timing() -> None:
    async def play(delay: float) -> set[tuple[str, int | None]]:
        script = Script(echo, delay=lambda n: delay * (n % 2))
        agents = make_agents(script)

        async def branch(b: int) -> None:
            first = await agents["solver"].chat(f"branch {b % 2}")
            await agents["checker"].chat(first.text)

        await asyncio.gather(*(branch(b) for b in range(4)))
        return {(agent, sampling.seed) for agent, _, sampling in script.asked}

    drawn = await play(0.0)
    assert drawn == await play(0.01)
    assert len(drawn) == 8  # equal prompts draw differently


async def test_turns_of_another_seed_draw_differently() -> None:
    seeds = set()
    for seed in range(5):
        script = Script(echo)
        await make_agents(script, seed=seed)["solver"].chat("x")
        seeds.add(script.asked[0][2].seed)
    assert len(seeds) == 5


async def test_generate_passes_ids_through() -> None:
    script = Script(echo)
    reply = await make_agents(script)["solver"].generate([5, 6, 7])
    assert script.asked[0][1] == reply.prompt_ids == (5, 6, 7)


async def test_a_turn_level_reward_must_be_finite() -> None:
    reply = await make_agents(Script(echo))["solver"].chat("x")
    assert reply.reward is None
    reply.reward = True
    assert reply.reward == 1.0
    for bad in (math.nan, math.inf, "1"):
        with pytest.raises(InvalidRewardError, match=r"solver\[0\]\.reward"):
            reply.reward = bad  # type: ignore[assignment]
    assert reply.reward == 1.0


async def test_nothing_is_recorded_after_the_end() -> None:
    agents = make_agents(Script(echo, delay=lambda n: 0.01 * n))
    done = await agents["solver"].chat("in time")
    late = asyncio.create_task(agents["solver"].chat("late"))
    await asyncio.sleep(0)
    assert [t.reply for t in agents.close()] == [done]
    await late
    assert [t.reply for t in agents.turns] == [done]
    with pytest.raises(TurnError, match="after the end of its trajectory"):
        await agents["solver"].chat("too late")


def test_an_unknown_agent_names_the_known_ones() -> None:
    with pytest.raises(UnknownAgentError, match="known: checker, solver") as caught:
        make_agents(Script(echo))["critic"]
    assert caught.value.value == "critic"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": 1001}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": "abc"}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_strings": ["END", ""]}, "stop_strings"),
        ({"stop_strings": [5]}, "stop_strings"),
        ({"seed": "seven"}, "seed"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_bad_sampling_is_refused(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMessagesError) as caught:
        await make_agents(Script(echo))["solver"].chat("x", **overrides)
    assert caught.value.field == field


@pytest.mark.parametrize("messages", [7, None, {"role": "user", "content": "x"}])
async def test_messages_that_are_not_a_list_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidMessagesError, match="a list of messages") as caught:
        await make_agents(Script(echo))["solver"].chat(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("ids", [[], ["a"], [1.5], [-1], [10**30]])
async def test_bad_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidMessagesError, match="token"):
        await make_agents(Script(echo))["solver"].generate(ids)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
