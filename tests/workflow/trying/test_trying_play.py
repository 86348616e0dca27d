"""`play` and its policies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.workflow import plays
from troupe.workflow import (
    Agents,
    EchoPolicy,
    Prompt,
    RandomPolicy,
    ScriptedPolicy,
    Spoken,
    ToolError,
    TurnError,
    UnknownAgentError,
    WorkflowError,
    make_role,
    play,
)
from troupe.workflow.scoring import RewardFailedError
from troupe.workflow.trying import LocalFunctions, Trial

QUERY = {"question": "3+4", "answer": "7"}
TOOLS = {"score": plays.score}


async def test_a_trajectory_without_any_model() -> None:
    script = ScriptedPolicy({"solver": ["7"], "checker": ["yes", "no"]})
    played = await play(
        plays.solve, QUERY, policy=script, tools=TOOLS, rewards={"brevity": plays.brevity}
    )
    assert [turn.reply.text for turn in played.turns if turn.reply] == ["7", "yes", "no"]
    assert played.rewards == {"solver": 0.5, "checker": 2.5, "team": 1.0}
    assert [(row.turn.role.name, row.group_id, row.reward) for row in played.samples] == [
        ("solver", "q0/solver", 0.5),
        ("checker", "q0/checker", 3.0),
        ("checker", "q0/checker", 2.0),
    ]
    assert (played.metrics["turns"], played.metrics["length"]) == (3, 1)


async def test_the_same_seed_plays_the_same_trajectory() -> None:
    async def said(seed: int) -> list[str]:
        played = await play(plays.solve, QUERY, tools=TOOLS, seed=seed)
        return [turn.reply.text for turn in played.turns if turn.reply]

    assert await said(1) == await said(1) != await said(2)


async def test_a_frozen_policy_makes_no_samples_and_needs_no_reward() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        await agents["judge"].chat((await agents["solver"].chat("x")).text)
        return {"solver": 1.0}

    played = await play(workflow, {}, trained={"solver"})
    assert [row.turn.role.name for row in played.samples] == ["solver"]
    with pytest.raises(RewardFailedError, match="'judge' took turns"):
        await play(workflow, {})


async def test_errors_of_the_workflow_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await play(plays.fails, {})
    with pytest.raises(WorkflowError, match="after 1 turns") as caught:
        await play(plays.sleeps, {}, seconds=0.1)
    assert caught.value.kind == "deadline"


async def test_agents_are_those_that_were_named() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        assert "critic" not in agents
        await agents["critic"].chat("x")
        return {}

    with pytest.raises(UnknownAgentError, match="known: solver"):
        await play(workflow, {}, agents=["solver"])


async def test_without_names_any_agent_is_one() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        assert "critic" in agents
        await agents["solver"].chat("x")
        return {"solver": 1.0, "critic": 2.0}

    assert (await play(workflow, {})).rewards == {"solver": 1.0, "critic": 2.0}


async def test_a_role_may_say_more_about_an_agent() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        await agents["solver"].chat("x")
        return {"solver": 1.0}

    role = make_role("solver", "Be brief.", max_new_tokens=3, temperature=0.5)
    played = await play(workflow, {}, agents={"solver": role}, policy=lambda prompt: "abcdef")
    [turn] = played.turns
    assert turn.messages == (("system", "Be brief."), ("user", "x"))
    assert turn.reply is not None
    assert (turn.reply.text, turn.reply.finish_reason) == ("abc", "length")


# Policies.


async def speak(policy: Any, **sampling: Any) -> list[str]:
    texts = []

    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        texts.extend(
            [(await agents["a"].chat(text, **sampling)).text for text in ("one", "two", "one")]
        )
        await agents["b"].generate([40, 41])

    await play(workflow, {}, policy=policy, trained=())
    return texts


async def test_the_random_policy_draws_anew_each_turn_unless_it_is_greedy() -> None:
    one, _, again = await speak(RandomPolicy())
    assert one != again
    one, _, again = await speak(RandomPolicy(), temperature=0.0)
    assert one == again
    assert set(await speak(RandomPolicy(["left", "right"]))) <= {"left", "right"}


async def test_random_tokens_have_their_probability() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        reply = await agents["a"].chat("x", max_new_tokens=5)
        assert len(reply.token_ids) == len(reply.logprobs) <= 5
        words = len(reply.token_ids) - (reply.finish_reason == "stop")
        assert reply.logprobs[:words] == pytest.approx([-math.log(37)] * words)

    for seed in range(5):
        await play(workflow, {}, trained=(), seed=seed)


async def test_the_echo_policy_repeats() -> None:
    assert await speak(EchoPolicy()) == ["one", "two", "one"]


async def test_a_script_answers_any_agent_or_by_name() -> None:
    assert await speak(ScriptedPolicy(["1", "2", "3", "4"])) == ["1", "2", "3"]
    assert await speak(ScriptedPolicy({"a": ["1", "2", "3"], "b": "x"})) == ["1", "2", "3"]
    assert await speak({"a": ScriptedPolicy("over"), "b": EchoPolicy()}) == ["over"] * 3


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (ScriptedPolicy(["1"]), "script_ended"),
        (ScriptedPolicy({"a": ["1", "2"]}), "script_ended"),
        (ScriptedPolicy({"b": "x"}), "script_ended"),
        ({"a": EchoPolicy()}, "no_policy"),
        (lambda prompt: 7, "bad_policy"),
    ],
)
async def test_a_policy_without_a_reply_fails_the_turn_with_its_kind(
    policy: Any, kind: str
) -> None:
    with pytest.raises(TurnError) as caught:
        await speak(policy)
    assert caught.value.kind == kind


@pytest.mark.parametrize("replies", [7, [7], {"a": [1]}, None, {"a": {"b": "c"}}])
def test_a_bad_script_is_refused(replies: Any) -> None:
    with pytest.raises(WorkflowError, match="a text or a list of texts") as caught:
        ScriptedPolicy(replies)
    assert caught.value.kind == "bad_script"


async def test_a_policy_sees_what_it_is_asked() -> None:
    seen: list[Prompt] = []

    async def policy(prompt: Prompt) -> Spoken:
        seen.append(prompt)
        return Spoken(prompt.tokenizer.encode("ok"), [-0.1, -0.2], stopped=False)

    await speak(policy, max_new_tokens=9)
    assert [(p.agent, p.number, p.position, p.text) for p in seen][:3] == [
        ("a", 0, 0, "one"),
        ("a", 1, 1, "two"),
        ("a", 2, 2, "one"),
    ]
    assert (seen[3].agent, seen[3].number, seen[3].messages, seen[3].ids) == ("b", 0, (), (40, 41))
    assert seen[0].sampling.max_new_tokens == 9


# Functions in this process behave like functions of the reward service.


@pytest.mark.parametrize(
    ("tool", "kind", "message"),
    [
        ("explodes", "raised", "RuntimeError: the tool's own bug"),
        ("no_json", "bad_result", "is not JSON"),
        ("hangs", "timeout", "gave no result within 0.3 s"),
        ("strange", "unknown_tool", "no tool 'strange'"),
    ],
)
async def test_a_tool_that_fails(tool: str, kind: str, message: str) -> None:
    tools = {"explodes": plays.explodes, "no_json": plays.no_json, "hangs": plays.hangs}

    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        with pytest.raises(ToolError, match=message) as caught:
            await tools.call(tool)
        assert caught.value.kind == kind
        if kind == "raised":
            assert "in explodes" in caught.value.traceback
            assert "functions.py" not in caught.value.traceback

    functions = LocalFunctions(tools, {}, seconds=0.3 if kind == "timeout" else 30)
    await Trial(workflow, {}, tools=tools, functions=functions).run()


async def test_a_query_must_be_json() -> None:
    with pytest.raises(WorkflowError, match="JSON") as caught:
        await play(plays.solve, {"question": object()})
    assert caught.value.kind == "bad_task"
