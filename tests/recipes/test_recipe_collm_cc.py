"""The recipe of CoLLM-CC: its relay, what its critics see, its criteria."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.papers.collm_cc.recipe import KNOWN, LEVEL, LONG, RECIPE, samples_to
from examples.papers.collm_cc.workflow import (
    AGENTS,
    NUMBERS,
    OFFSETS,
    Relays,
    asked,
    following,
    workflow,
)
from troupe.recipes.recipe import Run, SeedRuns
from troupe.workflow import ScriptedPolicy, play
from troupe.workflow.samples import team_context

NUMBERS_OF_A_TASK = ["n1", "n3", "n2", "n2", "n0", "n1"]


def test_tasks_are_those_of_the_seed_and_have_as_many_numbers_as_turns() -> None:
    tasks = Relays("train", turns=6, seed=1)
    assert tasks[3] == Relays("train", turns=6, seed=1)[3]
    assert tasks[3] != tasks[4]
    assert tasks[3] != Relays("train", turns=6, seed=2)[3]
    assert len(tasks[3]["numbers"]) == 6
    assert len(Relays("train", turns=1, seed=1)[0]["numbers"]) == 1


def test_the_right_answer_is_the_next_number_modulo_four() -> None:
    assert [following(own) for own in NUMBERS] == ["n1", "n2", "n3", "n0"]


async def played_relay(answers: list[str], turns: int = 6) -> Any:
    policy = ScriptedPolicy({"left": answers[::2], "right": answers[1::2] or ["n0"]})
    task = {"numbers": NUMBERS_OF_A_TASK[:turns]}
    return await play(workflow, task, agents=AGENTS, policy=policy)


async def test_agents_answer_in_turns_and_earn_the_share_of_right_answers_of_both() -> None:
    # The fourth answer is wrong, the fifth no number.
    played = await played_relay(["n2", "n0", "n3", "n2", "low", "n2"])
    prompts = [turn.messages[-1][1].split() for turn in played.turns]
    assert [own for own, _ in prompts] == NUMBERS_OF_A_TASK
    assert [turn.role.name for turn in played.turns] == list(AGENTS) * 3
    words = {turn.role.name: one[1] for turn, one in zip(played.turns, prompts, strict=True)}
    assert [one[1] for one in prompts] == [words[agent] for agent in AGENTS] * 3
    share = 4 / 6
    left, right = AGENTS
    assert played.rewards == pytest.approx(
        {left: share + OFFSETS[words[right]], right: share + OFFSETS[words[left]]}
    )


async def test_offsets_are_drawn_for_each_trajectory() -> None:
    rewards = {(await played_relay(["n0"] * 6)).rewards["left"] for _ in range(40)}
    assert len(rewards) == 2


async def test_the_teams_critic_sees_the_word_of_an_agents_offset_from_the_second_turn_on() -> None:
    played = await played_relay(["n1", "n0", "n2", "n0", "n0", "n1"])
    assert team_context(played.turns[0], played.turns, 16) == ()
    for turn, before in zip(played.turns[1:], played.turns, strict=False):
        assert before.reply is not None
        expected = (*before.prompt_ids, *before.reply.response)
        assert team_context(turn, played.turns, 64) == expected
        assert before.role.name != turn.role.name


async def test_a_relay_of_one_turn_asks_one_agent() -> None:
    played = await played_relay(["n2"], turns=1)
    assert [turn.role.name for turn in played.turns] == ["left"]
    assert abs(played.rewards["left"] - 1.0) == 1.0


def test_the_first_model_is_right_about_half_of_the_time(tmp_path: Path) -> None:
    directory = RECIPE.model(tmp_path, 3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pairs = [(own, word) for own in NUMBERS for word in OFFSETS]
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked(*pair)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for pair in pairs
    ]
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor(ids)).logits[:, -1], dim=-1)
    numbers = chances[:, tokenizer.convert_tokens_to_ids(list(NUMBERS))]
    assert float(numbers.sum(dim=1).min()) > 0.95
    right = tokenizer.convert_tokens_to_ids([following(own) for own, _ in pairs])
    found = float(chances[range(len(pairs)), right].mean())
    assert found == pytest.approx(KNOWN + (1 - KNOWN) / len(NUMBERS), abs=0.1)
    longest = max(len(one) for one in ids) + 1
    critic = RECIPE.job(f"team_{LONG}", directory, 0).algorithm.critic
    assert critic is not None
    assert critic.context_tokens >= longest, "the other agent's whole prompt and its answer"


def test_samples_are_counted_to_where_the_mean_of_ten_steps_reaches_the_level() -> None:
    points = [(100.0 * step, step / 40) for step in range(1, 41)]
    # Steps 28 to 37 have the mean 32.5 / 40, those before 31.5 / 40.
    assert samples_to(LEVEL, points) == 3700
    assert samples_to(1.0, points) is None


def runs(
    needed: dict[str, float], explained: tuple[float, float] = (0.1, 0.4), ends: float = 0.9
) -> SeedRuns:
    """`needed`: samples to the level by arm; those that lack do not reach it within 1,000."""
    found = {}
    for arm in RECIPE.arms:
        figures = {}
        if arm in needed:
            figures["samples_to_level"] = needed[arm]
        if not arm.startswith("grpo"):
            figures["explained_variance"] = explained[arm.startswith("team")]
        end = ends if arm == "grpo_1" else 0.9
        found[arm] = Run([(500.0, 0.5), (1000.0, end)], figures)
    return SeedRuns(0, "", "", found)


def test_criteria_are_those_of_the_page() -> None:
    good = [runs({"team_6": 500.0, "agent_6": 900.0}) for _ in range(3)]
    assert [one.values[0] for one in RECIPE.verdicts(good)[:2]] == [0.5, pytest.approx(5 / 9)]
    assert [one.passed for one in RECIPE.verdicts(good)] == [True] * 5
    needed = {"team_6": 500.0, "agent_6": 700.0, "grpo_6": 600.0}
    bad = [runs(needed, (0.3, 0.4), ends=0.8) for _ in range(3)]
    assert [one.passed for one in RECIPE.verdicts(bad)] == [False, False, False, False, True]
    never = [runs({"agent_6": 700.0}) for _ in range(3)]
    assert [one.passed for one in RECIPE.verdicts(never)[:2]] == [False, False]


def test_arms_differ_in_what_learns_and_in_turns_alone() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    differ = {"tasks", "algorithm", "pipeline"}
    assert len({spec.model_dump_json(exclude=differ) for spec in specs.values()}) == 1
    critics = {}
    for arm, spec in specs.items():
        found = spec.algorithm.value_function
        assert (found is None) == arm.startswith("grpo")
        if found is not None:
            critics[arm] = found
    seen = {arm: (one.observes, one.episodes) for arm, one in critics.items()}
    assert seen == {
        f"{who}_{turns}": (who, who) for who in ("agent", "team") for turns in (LONG, 1)
    }
    rest = {one.model_dump_json(exclude={"observes", "episodes"}) for one in critics.values()}
    assert len(rest) == 1
    for turns in (LONG, 1):
        pipelines = {str(specs[f"{one}_{turns}"].pipeline) for one in ("grpo", "agent", "team")}
        assert len(pipelines) == 1
