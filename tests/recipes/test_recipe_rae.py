"""The recipe of SPIRAL's RAE: exact play, variances of gradients, criteria."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.papers.rae.exact import FIRST_BETS, ExactPlay
from examples.papers.rae.recipe import RECIPE
from examples.papers.rae.workflow import DEALS, Deals
from examples.self_play.model import make_player
from troupe.recipes.recipe import Run, SeedRuns
from troupe.workflow.environments.adapters.openspiel import OpenSpiel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RECIPE.model(tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(scope="module")
def play(model: Path) -> ExactPlay:
    return ExactPlay(model)


def test_the_first_model_knows_moves_and_cards(play: ExactPlay) -> None:
    states = zip(play._game.questions, play._chances, play._moves, strict=True)
    for question, chances, moves in states:
        [bet] = [token for token, action in moves.items() if action == 1]
        card = question.messages[-1]["content"].split()[0]
        assert float(chances[bet]) == pytest.approx(FIRST_BETS[card], abs=0.05)
        assert float(chances[list(moves)].sum()) > 0.95


def test_values_of_fair_coins_are_those_of_the_game(tmp_path: Path) -> None:
    # A random model: 1/8 for the first seat, exploitability 0.4583.
    play = ExactPlay(make_player(tmp_path, seed=3))
    assert play.seat_values == pytest.approx([0.125, -0.125], abs=0.02)
    assert play.exploitability == pytest.approx(0.4583, abs=0.02)


def test_by_turns_the_first_seats_mean_return_is_that_of_games_in_which_it_is_asked_twice(
    tmp_path: Path,
) -> None:
    play = ExactPlay(make_player(tmp_path, seed=3))
    # Of fair coins: 1/8 over games; a quarter of the games have a second turn, and return -1/2.
    assert play.mean_return(0, by_turn=False) == pytest.approx(play.seat_values[0])
    assert play.mean_return(0, by_turn=True) == pytest.approx((0.125 - 0.25 / 2) / 1.25, abs=0.02)


def test_lines_of_the_game_have_the_values_of_the_seats(play: ExactPlay) -> None:
    lines = list(play.lines())
    assert len(lines) == 6 * 5
    assert sum(one.chance for one in lines) == pytest.approx(1.0)
    for seat in (0, 1):
        mean = sum(one.chance * one.returns[seat] for one in lines)
        assert mean == pytest.approx(play.seat_values[seat])


def test_the_variance_is_that_of_sampled_games(model: Path, play: ExactPlay) -> None:
    """Games are sampled from the lines, answers from the model's probabilities."""
    baselines = (0.3, -0.1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = list(network.parameters())
    gradients: dict[tuple[int, int], np.ndarray] = {}

    def gradient(question: int, token: int) -> np.ndarray:
        if (question, token) not in gradients:
            logprob = play._logprobs([question])[0, token]
            parts = torch.autograd.grad(logprob, list(play._model.parameters()))
            gradients[question, token] = torch.cat([p.flatten() for p in parts]).double().numpy()
        return gradients[question, token]

    draw = random.Random(0)
    lines = list(play.lines())
    total = np.zeros(sum(p.numel() for p in parameters))
    squares = 0.0
    games = 3_000
    for line in draw.choices(lines, [one.chance for one in lines], k=games):
        found = np.zeros_like(total)
        for seat, question, action in line.turns:
            chances, moves = play._chances[question].tolist(), play._moves[question]
            read = [
                chance * (moves[token] == action if token in moves else 0.5)
                for token, chance in enumerate(chances)
            ]
            [token] = draw.choices(range(len(read)), read)
            found += (line.returns[seat] - baselines[seat]) * gradient(question, token)
        total += found
        squares += float(found @ found)
    sampled = squares / games - float(total @ total) / games**2
    assert play.variances({"": baselines})[""] == pytest.approx(sampled, rel=0.1)


def runs(error: float, none: float, shared: float, ends: tuple[float, float, float]) -> SeedRuns:
    figures = {"baseline_error": error, "variance_over_none": none, "variance_over_shared": shared}
    arms = zip(RECIPE.arms, ends, strict=True)
    curves = {arm: Run([(100.0, 0.5), (200.0, end)]) for arm, end in arms}
    return SeedRuns(0, "", "", {**curves, "rae": Run(curves["rae"].points, figures)})


def test_criteria_are_those_of_the_page() -> None:
    good = [runs(0.02, 0.9, 0.95, (0.10 + seed / 100, 0.12, 0.11)) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(good)] == [True] * 4
    bad = [runs(0.04, 0.9, 1.01, (0.20 + seed / 100, 0.12, 0.21)) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(bad)] == [False, False, False, True]
    assert [one.passed for one in RECIPE.verdicts([*good, bad[0]])][:2] == [False, False]


def test_queries_have_all_deals_equally_often_and_seeds_of_their_own() -> None:
    tasks, held_out = Deals("train"), Deals("held_out")
    dealt: dict[int, tuple[int, ...]] = {}
    seeds = [tasks[index]["seed"] for index in range(60)]
    for seed in seeds:

        def note(state: Any, player: int, seed: int = seed) -> str:
            dealt[seed] = tuple(state.history()[:2])
            return ""

        OpenSpiel("kuhn_poker", describe=note).reset(seed)
    assert Counter(dealt.values()) == dict.fromkeys(DEALS, 10)
    assert len(set(seeds)) == 60
    assert held_out[0]["seed"] >= 2**40 > max(seeds)


def test_arms_differ_in_the_baseline_alone() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    assert specs["rae"].algorithm.advantage == "rae"
    assert specs["none"].algorithm.advantage.endswith(":no_baseline")
    assert list(specs["rae"].agents) == ["first", "second"]
    assert list(specs["shared"].agents) == ["player"], "an agent has one baseline"
    same = [spec.model_dump(exclude={"algorithm", "agents"}) for spec in specs.values()]
    assert same[0] == same[1] == same[2]
