"""Several replies to one prompt, trees of them, and the groups that they make."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.waiting import PATIENCE
from tests.workflow.stage import Script, make_agents, make_chat
from troupe.workflow import (
    Agents,
    InvalidGroupError,
    InvalidMessagesError,
    InvalidRewardError,
    Prompt,
    RandomPolicy,
    Reply,
    Sampling,
    TurnError,
    branch,
    play,
)
from troupe.workflow.samples import rows_of

CHAT = make_chat()


def echo(agent: str, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    return [*CHAT.encode(f"{agent} {sampling.seed}"), 2]


async def test_n_replies_to_one_prompt_are_independent_turns() -> None:
    script = Script(echo)
    agents = make_agents(script)
    replies = await agents["solver"].chat("3+4", n=3, temperature=0.5)
    assert [type(reply) for reply in replies] == [Reply] * 3
    assert len({reply.text for reply in replies}) == 3  # seeds of their own
    assert len({prompt for _, prompt, _ in script.asked}) == 1
    assert {sampling.temperature for _, _, sampling in script.asked} == {0.5}
    assert [reply.siblings for reply in replies] == [tuple(replies)] * 3
    turns = agents.close()
    assert [turn.number for turn in turns] == [turn.sibling for turn in turns] == [0, 1, 2]
    assert {turn.place for turn in turns} == {"0"}


async def test_the_seeds_are_those_of_as_many_single_calls() -> None:
    at_once, singly = Script(echo), Script(echo)
    await make_agents(at_once)["solver"].generate([5, 6], n=3)
    agent = make_agents(singly)["solver"]
    for _ in range(3):
        await agent.generate([5, 6])
    assert [s.seed for *_, s in at_once.asked] == [s.seed for *_, s in singly.asked]


async def test_a_seed_of_the_workflows_own_is_not_used_twice() -> None:
    script = Script(echo)
    await make_agents(script)["solver"].chat("x", n=3, seed=5)
    seeds = [sampling.seed for *_, sampling in script.asked]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


async def test_a_single_requested_reply_has_itself_as_sibling() -> None:
    [reply] = await make_agents(Script(echo))["solver"].chat("x", n=1)
    assert reply.siblings == (reply,)
    assert (await make_agents(Script(echo))["solver"].chat("x")).siblings == ()


async def test_branches_are_drawn_concurrently() -> None:
    """None is answered before all have been requested."""
    together = asyncio.Barrier(8)

    async def policy(prompt: Prompt) -> str:
        async with asyncio.timeout(PATIENCE):
            await together.wait()
        return "a"

    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        pair = asyncio.gather(*(agents["solver"].chat(f"{i}") for i in range(4)))
        await asyncio.gather(pair, agents["checker"].chat("x", n=4))
        return {"solver": 1.0, "checker": 1.0}

    played = await play(workflow, {}, policy=policy)
    assert len(played.turns) == 8


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_a_bad_number_is_refused_at_the_call(n: Any) -> None:
    with pytest.raises(InvalidMessagesError, match="whole number") as caught:
        _ = make_agents(Script(echo))["solver"].chat("x", n=n)
    assert (caught.value.field, caught.value.value) == ("n", str(n))


async def test_when_one_fails_the_others_are_cancelled_and_nothing_is_left() -> None:
    cancelled = 0

    async def policy(prompt: Prompt) -> str:
        nonlocal cancelled
        if prompt.number == 1:
            raise TurnError("the engine is gone", kind="engine_lost")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return ""

    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        await agents["solver"].chat("x", n=3)

    with pytest.raises(TurnError, match="the engine is gone"):
        await play(workflow, {}, policy=policy)
    assert cancelled == 2


async def test_replies_that_were_not_delivered_are_not_trained() -> None:
    async def policy(prompt: Prompt) -> str:
        if prompt.number == 1:
            await asyncio.sleep(0.01)  # the others have been said by then
            raise TurnError("the engine is gone", kind="engine_lost")
        return "said"

    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        with pytest.raises(TurnError):
            await agents["solver"].chat("x", n=3)
        last = await agents["solver"].chat("x")
        assert last.text == "said"
        return {"solver": 1.0}

    played = await play(workflow, {}, policy=policy)
    assert [(turn.number, turn.siblings) for turn in played.turns] == [(3, None)]
    assert len(played.samples) == 1


# Trees.


async def grow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
    """Two levels: the second continues from the best of the first."""

    def length(reply: Reply) -> float:
        return len(reply.text)

    plan = await branch(agents["planner"], query["question"], n=3, score=length)
    answer = await branch(agents["solver"], f"{query['question']} {plan.text}", n=2, score=length)
    return {"team": answer.reward or 0.0}


async def groups(query: dict[str, Any], seed: int, group_by: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in (await play(grow, query, seed=seed, group_by=group_by)).samples:
        sizes[row.group_id] = sizes.get(row.group_id, 0) + 1
    return sizes


async def test_the_siblings_of_a_turn_are_a_group_of_their_own_size() -> None:
    sizes = await groups({"question": "3+4"}, 0, "branch")
    assert sorted(sizes.values()) == [2, 3]
    [planner] = [name for name in sizes if name.startswith("q0/planner/0/")]
    assert sizes[planner] == 3


async def test_siblings_of_other_trajectories_join_only_where_the_prompt_was_the_same() -> None:
    one = await groups({"question": "3+4"}, 0, "branch")
    other = await groups({"question": "3+4"}, 1, "branch")
    # The plans answer the same prompt; the answers follow different plans.
    assert [name.split("/")[1] for name in one.keys() & other.keys()] == ["planner"]


async def test_by_turn_a_tree_has_one_group_per_agent_and_turn() -> None:
    for seed in range(2):
        assert await groups({"question": "3+4"}, seed, "turn") == {
            "q0/planner/0": 3,
            "q0/solver/0": 2,
        }


async def test_single_turns_next_to_branches_are_grouped_by_turn() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        for _ in range(2):
            await agents["solver"].chat("x")
        return {"solver": 1.0}

    played = await play(workflow, {}, group_by="branch")
    assert [row.group_id for row in played.samples] == ["q0/solver/0", "q0/solver/1"]


async def test_by_query_all_agents_of_a_query_share_a_baseline() -> None:
    assert await groups({"question": "3+4"}, 0, "query") == {"q0/*": 5}


async def test_a_workflow_groups_replies_by_keys_of_its_own() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        for key in ("opening", "", "opening"):
            reply = await agents["solver"].chat("x")
            reply.group = key
        (await agents["critic"].chat("y")).group = "opening"
        return {"solver": 1.0, "critic": 0.0}

    played = await play(workflow, {})
    ids = ["q0/=opening", "q0/solver", "q0/=opening", "q0/=opening"]
    assert [row.group_id for row in played.samples] == ids
    # Where advantages are computed along an agent's turns, these stay together.
    kept = rows_of(
        played.turns,
        query_id="q0",
        trajectory_id="t",
        trained={turn.role.policy for turn in played.turns},
        rewards=played.rewards,
        group_by="agent",
        own_groups=False,
    )
    assert [row.group_id for row in kept] == ["q0/solver"] * 3 + ["q0/critic"]


@pytest.mark.parametrize("key", [7, "x" * 65, "a\tb", None])
async def test_a_key_that_cannot_be_stored_is_refused_where_it_is_set(key: Any) -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        (await agents["solver"].chat("x")).group = key
        return {"solver": 1.0}

    with pytest.raises(InvalidGroupError, match="at most 64 printable") as caught:
        await play(workflow, {})
    assert caught.value.field == "solver[0].group"


async def choose(how: Any, seed: int = 0, **options: Any) -> tuple[Reply, list[float | None]]:
    chosen: list[Reply] = []

    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        async def score(reply: Reply) -> float:
            await asyncio.sleep(0)
            return {"a": 1.0, "b": 3.0, "c": 3.0}[reply.text]

        chosen.append(await branch(agents["solver"], "x", n=6, score=score, choose=how, **options))

    await play(workflow, {}, policy=RandomPolicy(["a", "b", "c"]), seed=seed)
    return chosen[0], [reply.reward for reply in chosen[0].siblings]


async def test_the_first_of_the_best_goes_on_and_all_are_rewarded() -> None:
    reply, rewards = await choose("best")
    assert set(rewards) == {1.0, 3.0}
    assert reply.siblings.index(reply) == rewards.index(3.0)


async def test_sampling_is_repeatable_and_follows_the_rewards() -> None:
    async def picked(seed: int, greediness: float) -> int:
        reply, _ = await choose("sample", seed, greediness=greediness)
        return reply.siblings.index(reply)

    assert [await picked(s, 1.0) for s in range(9)] == [await picked(s, 1.0) for s in range(9)]
    for seed in range(9):
        reply, rewards = await choose("sample", seed, greediness=1000.0)
        assert reply.reward == max(r for r in rewards if r is not None)
    assert len({await picked(s, 0.0) for s in range(20)}) > 3


async def test_a_function_may_choose() -> None:
    reply, rewards = await choose(lambda replies: replies[-1])
    assert reply is reply.siblings[-1]
    assert len(rewards) == 6
    stranger = Reply("solver", 0, "", (1,), (), (), "stop")
    with pytest.raises(InvalidMessagesError, match="choose cannot be"):
        await choose(lambda replies: stranger)


@pytest.mark.parametrize("options", [{"how": "worst"}, {"how": "sample", "greediness": -1}])
async def test_bad_choices_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessagesError):
        await choose(**options)


@pytest.mark.parametrize("value", [float("nan"), None, "good"])
async def test_a_score_must_be_a_number(value: Any) -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        await branch(agents["solver"], "x", n=2, score=lambda reply: value)

    with pytest.raises(InvalidRewardError, match=r"the score of solver\[\d\] must be"):
        await play(workflow, {})
