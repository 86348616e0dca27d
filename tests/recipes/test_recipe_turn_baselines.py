"""The recipe of baselines per turn index: its game, its advantages, its criteria."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from examples.papers.turn_baselines.game import (
    BONUS,
    OUTCOMES,
    Episode,
    intermediate,
    per_index,
    play,
    to_go,
    values,
    whole,
)
from examples.papers.turn_baselines.recipe import RECIPE, bias
from troupe.recipes.recipe import Run, SeedRuns

STOPPED = Episode([False], [], 1.0)
ONCE = Episode([True, False], [1.0], 0.0)
TWICE = Episode([True, True, False], [0.0, 1.0], 1.0)


def runs(to_go: float, whole: float, per_index: float, hidden: float) -> SeedRuns:
    ends = {"to_go": to_go, "whole": whole, "per_index": per_index}
    curves = {arm: Run([(100.0, 0.5), (200.0, value)]) for arm, value in ends.items()}
    biases = {"bias_to_go": 0.0, "bias_whole": -0.01, "bias_per_index": hidden}
    return SeedRuns(0, "", "", curves, biases)


def test_values_of_the_game_are_those_of_played_episodes() -> None:
    draw = random.Random(0)
    go = (0.75, 0.25)
    played = [play(go, draw) for _ in range(40_000)]
    mean = sum(one.returns_to_go[0] for one in played) / len(played)
    assert mean == pytest.approx(values(go)[0], abs=0.02)
    went = [one for one in played if one.went[0]]
    bonuses = sum(sum(one.bonuses) for one in went) / len(went)
    assert bonuses == pytest.approx(intermediate(go), abs=0.02)
    assert intermediate(go) == BONUS + go[1] * BONUS


def test_going_is_right_at_both_turns_and_outcomes_alone_say_the_opposite() -> None:
    best = values((1.0, 1.0))
    assert best[0] > OUTCOMES[0]
    assert best[1] > OUTCOMES[1]
    assert list(OUTCOMES) == sorted(OUTCOMES, reverse=True)


def test_advantages_per_index_add_centred_bonuses_and_a_centred_outcome() -> None:
    found = per_index([STOPPED, ONCE, TWICE])
    # The first turns' bonuses, 1 and 0, are compared with each other; the second turn has no peer.
    # Outcomes 1, 0, 1 against the means of the others: 1/2, -1, 1/2.
    expected = [[0.5], [1 - 1, -1.0], [-1 + 0.5, 0.5, 0.5]]
    assert [pytest.approx(one) for one in expected] == found


def test_returns_are_compared_at_the_same_turn() -> None:
    group = [STOPPED, ONCE, TWICE]
    # Returns at the first turn 1, 1, 2; at the second 0 and 2; at the third 1.
    expected = [[-0.5], [-0.5, -2.0], [1.0, 2.0, 0.0]]
    assert [pytest.approx(one) for one in expected] == to_go(group)
    expected = [[-0.5], [-0.5, -1.0], [1.0, 1.0, 0.0]]
    assert [pytest.approx(one) for one in expected] == whole(group)


def test_the_bias_is_the_expected_bonus_for_the_index_alone() -> None:
    for arm, expected in (("to_go", 0.0), ("whole", 0.0), ("per_index", -intermediate((0.5, 0.5)))):
        assert bias(arm, 20_000, seed=3) == pytest.approx(expected, abs=0.05), arm


@pytest.mark.parametrize(
    ("ends", "passes"),
    [
        ((0.99, 0.99, 0.01, -0.75), [True, True, True, True]),
        ((0.99, 0.94, 0.06, -0.80), [False, True, False, False]),
    ],
)
def test_criteria_are_those_of_the_page(
    ends: tuple[float, float, float, float], passes: list[bool]
) -> None:
    assert [one.passed for one in RECIPE.verdicts([runs(*ends)])] == passes


def test_one_seed_that_misses_a_goal_fails_it() -> None:
    good, bad = runs(0.99, 0.99, 0.01, -0.75), runs(0.99, 0.99, 0.2, -0.75)
    assert [one.passed for one in RECIPE.verdicts([good, bad])] == [True, True, False, True]


def test_arms_differ_in_their_rewards_and_play_equally_many_episodes_per_step() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    for first, second in itertools.pairwise(specs.values()):
        hidden = {"tasks", "algorithm", "pipeline"}
        assert first.model_dump(exclude=hidden) == second.model_dump(exclude=hidden)
    episodes = {
        spec.pipeline.queries_per_step
        * spec.pipeline.group_size
        * (1 if spec.tasks is None else int(spec.tasks.args.get("episodes", 1)))
        for spec in specs.values()
    }
    assert episodes == {128}
