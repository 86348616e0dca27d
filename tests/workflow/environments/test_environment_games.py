"""Workflows that play: prompts, the effects of illegal answers, and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from tests.workflow.environments.zoo import Nim, Pennies
from troupe.workflow import EntrypointError, ScriptedPolicy, load_workflow, play
from troupe.workflow.environments import (
    COUNTERS,
    EnvironmentFault,
    Episodes,
    FaultLimits,
    GameWorkflow,
    IllegalRule,
    PlayRules,
    SeatingError,
)
from troupe.workflow.trying import Played, Prompt

# Seeds of heaps of five: taking one each time, the first to move wins.
ODD = 1


async def game(
    workflow: GameWorkflow,
    policy: Any = lambda prompt: "1",
    agents: Any = ("x", "y"),
    seed: int = ODD,
) -> Played:
    return await play(workflow, {"seed": seed}, policy=policy, agents=agents, seconds=PATIENCE)


def rewards_of(played: Played) -> list[tuple[str, float | None]]:
    return [(row.turn.role.name, row.reward) for row in played.samples]


async def test_turns_go_round_and_every_seat_has_its_own_conversation() -> None:
    played = await game(GameWorkflow(Nim, permute=False))
    assert [turn.role.name for turn in played.turns] == ["x", "y", "x", "y", "x"]
    last = played.turns[-1].messages
    assert last[0] == ("user", "Take 1 or 2.\n\nheap 5\n\nLegal moves: 1, 2.")
    assert last[1:3] == (("assistant", "1"), ("user", "heap 3\n\nLegal moves: 1, 2."))
    assert played.rewards == {"x": 1.0, "y": -1.0}
    assert rewards_of(played) == [("x", 1.0), ("y", -1.0)] * 2 + [("x", 1.0)]
    figures = {"game_steps", "illegal_moves", "forfeits", "return_left", "return_right"}
    assert figures <= set(played.metrics)
    assert (played.metrics["game_steps"], played.metrics["return_left"]) == (5, 1.0)


async def test_the_latest_observation_alone() -> None:
    played = await game(GameWorkflow(Nim, permute=False, rules=PlayRules(history="latest")))
    assert [len(turn.messages) for turn in played.turns] == [1] * 5
    assert played.turns[-1].messages[0][1] == "Take 1 or 2.\n\nheap 1\n\nLegal moves: 1."


async def test_seats_alternate_with_the_seed_and_rewards_follow() -> None:
    """The first mover from a heap of five wins: seeds of both parities."""
    from random import Random

    seeds = [s for s in range(60) if Random(s).randint(4, 9) == 5]
    assert {s % 2 for s in seeds} == {0, 1}
    for seed in seeds:
        played = await game(GameWorkflow(Nim), seed=seed)
        first = "x" if seed % 2 == 0 else "y"
        assert played.turns[0].role.name == first
        assert played.rewards[first] == 1.0


async def test_one_agent_plays_itself_and_every_turn_gets_its_own_seats_reward() -> None:
    played = await game(GameWorkflow(Nim), agents=["solo"])
    assert rewards_of(played) == [("solo", r) for r in (1.0, -1.0, 1.0, -1.0, 1.0)]


async def test_simultaneous_moves_are_asked_at_once() -> None:
    asked = 0
    both = asyncio.Event()

    async def policy(prompt: Prompt) -> str:
        nonlocal asked
        asked += 1
        if asked % 2 == 0:
            both.set()
        await asyncio.wait_for(both.wait(), PATIENCE)  # one after the other would wait for ever
        return "heads"

    played = await game(GameWorkflow(Pennies, permute=False), policy)
    assert played.rewards == {"x": 3.0, "y": 3.0, "team": 3.0}
    assert [turn.role.name for turn in played.turns] == ["x", "y"] * 3


async def test_the_order_of_turns_does_not_depend_on_who_answers_first() -> None:
    async def policy(prompt: Prompt) -> str:
        await asyncio.sleep(0.01 if prompt.agent == "x" else 0)
        return "nonsense" if prompt.number == 0 else "tails"

    rules = PlayRules(illegal="resample")
    played = await game(GameWorkflow(Pennies, permute=False, rules=rules), policy)
    assert [turn.role.name for turn in played.turns] == ["x", "y"] * 4
    assert played.metrics["illegal_moves"] == 2


async def test_reward_to_go() -> None:
    answers = {"x": ["heads"] * 3, "y": ["heads", "tails", "heads"]}
    workflow = GameWorkflow(Pennies, permute=False, credit="to_go")
    played = await game(workflow, ScriptedPolicy(answers))
    assert [reward for name, reward in rewards_of(played) if name == "x"] == [2.0, 1.0, 1.0]


RULES: list[tuple[IllegalRule, int, dict[str, float], int]] = [
    # (rule, answers of x, rewards, forfeits)
    ("lose", 1, {"x": -1.0, "y": 1.0}, 1),
    ("resample", 3, {"x": -1.0, "y": 1.0}, 1),
    ("random_legal", 0, {}, 0),
]


@pytest.mark.parametrize(("rule", "answers", "rewards", "forfeits"), RULES)
async def test_a_player_without_legal_moves_is_treated_as_the_rule_says(
    rule: IllegalRule, answers: int, rewards: dict[str, float], forfeits: int
) -> None:
    def policy(prompt: Prompt) -> str:
        return "hm" if prompt.agent == "x" else "1"

    workflow = GameWorkflow(Nim, permute=False, rules=PlayRules(illegal=rule))
    before = COUNTERS.of("illegal_moves", "Nim")
    played = await game(workflow, policy)
    by_x = [reward for name, reward in rewards_of(played) if name == "x"]
    assert set(by_x) == {-1.0}  # an illegal answer is punished, whoever wins
    assert played.metrics["forfeits"] == forfeits
    assert COUNTERS.of("illegal_moves", "Nim") == before + len(by_x)
    if answers:
        assert (len(by_x), played.rewards) == (answers, rewards)
    else:
        assert sorted(played.rewards.values()) == [-1.0, 1.0]  # played to the end
        again = await game(workflow, policy)
        assert again.rewards == played.rewards  # drawn from the seed


@pytest.mark.parametrize(("rule", "answers", "rewards", "forfeits"), RULES)
async def test_a_job_has_its_own_rule_for_illegal_moves(
    rule: IllegalRule, answers: int, rewards: dict[str, float], forfeits: int
) -> None:
    tasks = Episodes("train", first_seed=ODD, illegal=rule)
    workflow = GameWorkflow(Nim, permute=False, rules=PlayRules(illegal="resample", resamples=7))
    if rule == "resample":
        tasks = Episodes("train", first_seed=ODD, illegal=rule, resamples=2)

    def policy(prompt: Prompt) -> str:
        return "hm" if prompt.agent == "x" else "1"

    played = await play(workflow, tasks[0], policy=policy, agents=("x", "y"), seconds=PATIENCE)
    assert played.metrics["forfeits"] == forfeits
    if answers:
        assert played.metrics["illegal_moves"] == answers
        assert played.rewards == rewards


def test_rules_that_there_are_not() -> None:
    with pytest.raises(EntrypointError, match="One of lose, resample") as info:
        Episodes("train", illegal="forgive")  # type: ignore[arg-type]
    assert (info.value.field, info.value.value) == ("tasks.args.illegal", "forgive")
    for bad in (-1, 0.5, "two"):
        with pytest.raises(EntrypointError, match="must be a whole number"):
            Episodes("train", resamples=bad)  # type: ignore[arg-type]


async def test_a_repeated_question_names_the_legal_moves() -> None:
    answers = {"x": ["three", "1", "1", "1"], "y": "1"}
    played = await game(GameWorkflow(Nim, permute=False), ScriptedPolicy(answers))
    assert played.turns[1].messages[-2:] == (
        ("assistant", "three"),
        ("user", "That is no legal move. Legal moves: 1, 2."),
    )
    assert rewards_of(played)[:2] == [("x", -1.0), ("x", 1.0)]


class Quiet(Nim):
    """Tells no legal moves: only the game itself knows."""

    def observe(self) -> dict[str, Any]:
        from dataclasses import replace

        return {seat: replace(seen, legal=None) for seat, seen in super().observe().items()}

    def step(self, actions: Any) -> Any:
        return super().step({s: int(a) if a.isdigit() else a for s, a in actions.items()})


async def test_a_move_that_only_the_game_knows_to_be_illegal() -> None:
    answers = {"x": ["7", "1", "1", "1"], "y": "1"}
    played = await game(GameWorkflow(Quiet, permute=False), ScriptedPolicy(answers))
    assert played.metrics["illegal_moves"] == 1
    assert rewards_of(played)[:2] == [("x", -1.0), ("x", 1.0)]
    lost = await game(GameWorkflow(Quiet, permute=False), ScriptedPolicy({"x": "7", "y": "1"}))
    assert lost.rewards == {"x": -1.0, "y": 1.0}


async def test_seats_are_held_as_the_job_says() -> None:
    workflow = GameWorkflow(Nim, seats={"left": "y", "right": "x"}, permute=False)
    assert (await game(workflow)).rewards == {"y": 1.0, "x": -1.0}
    with pytest.raises(SeatingError, match="do not match"):
        await game(GameWorkflow(Nim), agents=["x", "y", "z"])


async def test_a_fault_is_the_trajectorys_and_can_be_told_apart() -> None:
    class Broken(Nim):
        def step(self, actions: Any) -> Any:
            raise OSError("the licence server is gone")

    with pytest.raises(EnvironmentFault, match="the licence server is gone"):
        await game(GameWorkflow(Broken))


@pytest.fixture
async def workflow() -> AsyncIterator[GameWorkflow]:
    limits = FaultLimits(retries=0)
    workflow = GameWorkflow(
        "tests.workflow.environments.zoo:Nim", hosted=True, processes=2, limits=limits
    )
    yield workflow
    await workflow.close()


async def test_hosted_games_are_the_same_games(workflow: GameWorkflow) -> None:
    here = GameWorkflow("tests.workflow.environments.zoo:Nim")
    seeds = range(6)
    played = await asyncio.gather(*(game(workflow, seed=seed) for seed in seeds))
    for seed, hosted in zip(seeds, played, strict=True):
        local = await game(here, seed=seed)
        assert (hosted.rewards, hosted.metrics) == (local.rewards, local.metrics)
    assert COUNTERS.of("starts", "tests.workflow.environments.zoo:Nim") >= 2


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 50),
    answers=st.lists(st.sampled_from(["1", "2", "3", "I take [2]", "hm", ""]), min_size=1),
    rule=st.sampled_from(["lose", "resample", "random_legal"]),
    solo=st.booleans(),
)
def test_whatever_is_answered_the_game_ends_and_every_turn_is_rewarded(
    seed: int, answers: list[str], rule: IllegalRule, solo: bool
) -> None:
    workflow = GameWorkflow(Nim, rules=PlayRules(illegal=rule))
    agents = ["x"] if solo else ["x", "y"]
    played = asyncio.run(
        game(workflow, lambda p: answers[p.position % len(answers)], agents, seed=seed)
    )
    figures = played.metrics
    assert figures["return_left"] == -figures["return_right"]
    assert 0 < figures["game_steps"] <= Nim.declared.max_steps
    rewards = [reward for _, reward in rewards_of(played)]
    assert set(rewards) <= {-1.0, 1.0}
    assert len(rewards) == len(played.turns)
    if figures["illegal_moves"] == 0:
        assert figures["game_steps"] == len(played.turns)


def test_only_a_named_environment_is_hosted() -> None:
    with pytest.raises(EntrypointError, match="by name"):
        GameWorkflow(Nim, hosted=True)


def test_a_game_is_a_workflow_by_name() -> None:
    assert callable(load_workflow("tests.workflow.environments.test_environment_games:nim"))


def test_splits_share_no_episode() -> None:
    def seeds(split: str) -> set[int]:
        tasks = Episodes(split, size=100)
        return {tasks[i]["seed"] for i in range(len(tasks))}

    assert not seeds("train") & seeds("held_out")


nim: Callable[..., Any] = GameWorkflow(Nim)
