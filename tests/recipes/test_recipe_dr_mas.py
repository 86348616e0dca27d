"""The recipe of Dr. MAS: its task, measured and predicted inflation, its criteria."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.papers.dr_mas.inflation import (
    ARMS,
    Answers,
    Group,
    entries_of,
    measured,
    predicted,
    rewards_of,
    shared_advantages,
)
from examples.papers.dr_mas.recipe import RECIPE, spikes
from examples.papers.dr_mas.workflow import (
    BITS,
    CHECKS,
    NEEDED,
    Questions,
    answers_of,
    random_bits,
    right_bits,
    workflow,
)
from services.trainer.learning.advantages import AdvantageEstimator
from tests.trainer.learning.test_baselines import row
from troupe.algorithms.registry import ADVANTAGES
from troupe.recipes.recipe import Run, SeedRuns
from troupe.workflow import ScriptedPolicy, play


async def test_an_answer_is_rewarded_for_as_many_right_bits_as_its_agent_needs() -> None:
    task = Questions("train", seed=3)[2]
    wrong = [words[1 - words.index(bit)] for words, bit in zip(BITS, task["answer"], strict=True)]
    right = task["answer"]
    said = {
        "proposer": " ".join([*right[:4], *wrong[4:]]),
        "checker": " ".join([*right[:3], *wrong[3:]]),
    }
    agents = ("proposer", "checker")
    played = await play(workflow, task, agents=agents, policy=ScriptedPolicy(said))
    assert {sample.reward for sample in played.samples[:1]} == {0.0}
    assert {sample.reward for sample in played.samples[1:]} == {1.0}
    assert all(said["proposer"] in turn.messages[-1][1] for turn in played.turns[1:])
    said["proposer"] = " ".join([*right[:5], *wrong[5:]])
    said["checker"] = " ".join([*right[:2], *wrong[2:]])
    played = await play(workflow, task, agents=agents, policy=ScriptedPolicy(said))
    assert [sample.reward for sample in played.samples[:2]] == [1.0, 0.0]


async def test_a_fair_coin_decides_how_many_checks_a_proposal_has() -> None:
    task = Questions("train", seed=3)[0]
    agents = ("proposer", "checker")
    policy = ScriptedPolicy(" ".join(task["answer"]))
    counts = [
        len((await play(workflow, task, agents=agents, policy=policy)).turns) - 1 for _ in range(60)
    ]
    assert set(counts) == set(CHECKS)
    assert 10 < counts.count(CHECKS[0]) < 50


def test_random_bits_are_rewarded_as_often_as_the_page_says() -> None:
    answers = answers_of(3)
    assert answers == answers_of(3) != answers_of(4)
    draw = random.Random(0)
    counts = [right_bits(random_bits(draw), answers[0]) for _ in range(20_000)]
    for agent, share in (("proposer", 29 / 128), ("checker", 99 / 128)):
        assert sum(c >= NEEDED[agent] for c in counts) / len(counts) == pytest.approx(
            share, abs=0.02
        )
    assert right_bits([], answers[0]) == right_bits(["check"] * 7, answers[0]) == 0


def group_of(draw: random.Random, size: int) -> Group:
    """Rewards of 0.25 and 0.75 on average, and norms that do not depend on them."""

    def sample(share: float) -> tuple[float, float]:
        return float(draw.random() < share), 1 + draw.random()

    return [
        {"proposer": [sample(0.25)], "checker": [sample(0.75) for _ in range(draw.choice(CHECKS))]}
        for _ in range(size)
    ]


@pytest.mark.parametrize(("arm", "weight"), [("trajectory", (1 / 2 + 1 / 8) / 2), ("step", 1 / 5)])
def test_inflation_is_the_predicted_one_where_norms_do_not_depend_on_rewards(
    arm: str, weight: float
) -> None:
    draw = random.Random(1)
    groups = [group_of(draw, 500) for _ in range(20)]
    assert measured(groups, arm) == pytest.approx(predicted(groups, arm), rel=0.05)
    mean = 0.75 - weight / 2
    variance = mean * (1 - mean)
    expected = [(0.1875 + (own - mean) ** 2) / variance for own in (0.25, 0.75)]
    assert predicted(groups, arm) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("arm", ARMS)
def test_advantages_are_those_that_the_trainer_computes_in_the_arms_job(arm: str) -> None:
    group = group_of(random.Random(2), 8)
    algorithm = RECIPE.job(arm, Path("model"), 0).algorithm
    everything = tuple(reward for agent in NEEDED for reward in rewards_of(group, agent))
    rows = [
        replace(row("g", f"t{number}", turn, reward, agent=agent), group_rewards=everything)
        for agent in NEEDED
        for number, trajectory in enumerate(group)
        for turn, (reward, _) in enumerate(trajectory[agent])
    ]
    estimator = AdvantageEstimator(algorithm, ADVANTAGES[algorithm.advantage])
    expected = torch.cat([shared_advantages(group, agent, arm) for agent in NEEDED])
    torch.testing.assert_close(estimator.estimate(rows).advantages.to(expected.dtype), expected)


def test_entries_are_samples_or_means_of_trajectories_with_the_variance_within() -> None:
    two = [(0.0, 1.0), (1.0, 1.0)]
    group: Group = [{"proposer": [(0.0, 1.0)], "checker": two}, {"proposer": two, "checker": []}]
    assert entries_of(group, "step") == ([0.0, 0.0, 1.0, 0.0, 1.0], 0.0)
    means, within = entries_of(group, "trajectory")
    assert means == pytest.approx([1 / 3, 1 / 2])
    assert within == pytest.approx((2 / 9 + 1 / 4) / 2)


def test_norms_are_those_of_the_gradients_of_whole_answers(tmp_path: Path) -> None:
    first = RECIPE.model(tmp_path, 3)
    answers = Answers(first, 3, 4)
    assert len(answers.groups) == len(answers_of(3))
    [(text, norm)] = answers._drawn(["question1"])
    learned = sum(word in words for word, words in zip(text.split(), BITS, strict=True))
    assert learned >= 6, "it has learned what an answer is"
    prompt = answers._tokenizer.apply_chat_template(
        [{"role": "user", "content": "question1"}], add_generation_prompt=True, return_dict=False
    )
    said = answers._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(said) == len(BITS)
    model = answers._model
    model.zero_grad()
    logprobs = torch.log_softmax(model(torch.tensor([prompt + said])).logits[0], dim=-1)
    places = torch.arange(len(BITS)) + len(prompt) - 1
    torch.autograd.backward(logprobs[places, torch.tensor(said)].sum())
    expected = sum(float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None)
    assert norm == pytest.approx(expected, rel=1e-4)


def test_a_spike_is_more_than_three_medians_of_the_steps_before() -> None:
    assert spikes([1.0, 1.0, 3.1, 1.0, 2.9, 0.0, 3.1]) == 2
    assert spikes([1.0] * 30 + [4.0] * 30) == 10, "until the median of 20 steps follows"


def runs(ratio: float, counts: tuple[float, float, float], ends: tuple[float, ...]) -> SeedRuns:
    figures: dict[str, float] = {}
    for arm in ARMS:
        for agent in NEEDED:
            figures |= {f"inflation_{arm}_{agent}": 2 * ratio, f"predicted_{arm}_{agent}": 2.0}
    arms = zip(RECIPE.arms, counts, ends, strict=True)
    curves = {arm: Run([(50.0, 0.5), (100.0, end)], {"spikes": count}) for arm, count, end in arms}
    return SeedRuns(0, "", "", curves, figures)


def test_criteria_are_those_of_the_page() -> None:
    good = [runs(1.1, (6, 4, 1), (0.8, 0.8, 0.8 + seed / 100)) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(good)] == [True] * 5
    bad = [runs(1.3, (2, 0, 1), (0.8, 0.9, 0.7 + seed / 100)) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(bad)] == [False] * 5


def test_arms_differ_in_their_baselines_alone() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    chosen = {
        arm: (spec.algorithm.group_by, spec.algorithm.baseline_weight)
        for arm, spec in specs.items()
    }
    assert chosen == {
        "trajectory": ("query", "trajectory"),
        "step": ("query", "sample"),
        "agent": ("agent", "sample"),
    }
    assert len({spec.model_dump_json(exclude={"algorithm"}) for spec in specs.values()}) == 1
