"""Exact games: payoffs, best responses and NashConv are OpenSpiel's; PSRO ends at equilibria."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from troupe.populations.psro import ExactPsro
from troupe.populations.tree import SequenceForm

pyspiel = pytest.importorskip("pyspiel")
from open_spiel.python import policy as policies  # noqa: E402
from open_spiel.python.algorithms import expected_game_score, exploitability  # noqa: E402


@pytest.fixture(scope="module", params=["kuhn_poker", "kuhn_poker(players=3)", "leduc_poker"])
def game(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tabular(loaded: Any, form: SequenceForm, plans: list[np.ndarray]) -> Any:
    """Plans as one OpenSpiel policy of all players."""
    table = policies.TabularPolicy(loaded)
    for player, plan in enumerate(plans):
        for name, shares in form.behaviour(player, plan).items():
            row = table.policy_for_key(name)
            row[:] = 0.0
            for action, share in shares.items():
                row[action] = share
    return table


def random_plans(form: SequenceForm, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        form.plan(player, [rng.dirichlet(np.ones(len(a))) for a in form.decisions[player].actions])
        for player in range(form.players)
    ]


def test_values_and_nash_conv_are_openspiels(game: str) -> None:
    loaded, form = pyspiel.load_game(game), SequenceForm.of(game)
    for plans in ([form.uniform(i) for i in range(form.players)], random_plans(form, 1)):
        policy = tabular(loaded, form, plans)
        theirs = expected_game_score.policy_value(
            loaded.new_initial_state(), [policy] * form.players
        )
        assert form.values(plans) == pytest.approx(theirs, abs=1e-12)
        assert form.nash_conv(plans) == pytest.approx(
            exploitability.nash_conv(loaded, policy), abs=1e-9
        )


def test_a_plan_is_its_policy_and_back() -> None:
    form = SequenceForm.of("leduc_poker")
    for player, plan in enumerate(random_plans(form, 2)):
        assert form.plan_of(player, form.behaviour(player, plan)) == pytest.approx(plan, abs=1e-12)
        assert form.plan_of(player, {}) == pytest.approx(form.uniform(player))


def test_a_mixture_of_plans_is_play_by_a_member_drawn_per_episode() -> None:
    form = SequenceForm.of("kuhn_poker")
    first, second, other = *(random_plans(form, s)[0] for s in (3, 4)), random_plans(form, 5)[1]
    mixed = form.values([0.3 * first + 0.7 * second, other])
    apart = 0.3 * form.values([first, other]) + 0.7 * form.values([second, other])
    assert mixed == pytest.approx(apart)


@pytest.mark.parametrize("tremble", [0.0, 1e-9])
def test_no_answer_is_better_than_the_best(game: str, tremble: float) -> None:
    form = SequenceForm.of(game)
    plans = random_plans(form, 6)
    rng = np.random.default_rng(7)
    for player in range(form.players):
        answer, value = form.best_response(player, plans, tremble=tremble)
        exact = form.best_response(player, plans)[1]
        assert value == pytest.approx(exact, abs=1e-6)
        assert set(np.unique(answer)) <= {0.0, 1.0}, "a pure plan"
        against = [*plans[:player], answer, *plans[player + 1 :]]
        assert form.values(against)[player] == pytest.approx(value)
        for _ in range(5):
            sets = form.decisions[player].actions
            plan = form.plan(player, [rng.dirichlet(np.ones(len(a))) for a in sets])
            assert plan @ form.gradient(player, plans) <= value + 1e-12


def test_psro_solves_kuhn_poker_and_openspiel_agrees_with_every_iteration() -> None:
    loaded, form = pyspiel.load_game("kuhn_poker"), SequenceForm.of("kuhn_poker")
    for tremble in (0.0, 1e-9):
        found = list(ExactPsro(form, tremble=tremble).run(30))
        assert found[-1].nash_conv < 1e-6
        assert form.values(found[-1].plans)[0] == pytest.approx(-1 / 18, abs=1e-9)
        for one in found:
            policy = tabular(loaded, form, list(one.plans))
            assert exploitability.nash_conv(loaded, policy) == pytest.approx(
                one.nash_conv, abs=1e-9
            )


def test_leduc_poker_gets_nearer_with_any_meta_solver() -> None:
    form = SequenceForm.of("leduc_poker")
    for solver, least in (("nash", 1.5), ("uniform", 2.0), ("fictitious_play", 2.0)):
        options = {"iterations": 200} if solver == "fictitious_play" else {}
        runs = ExactPsro(form, solver, **options).run(25)  # type: ignore[arg-type]
        assert min(one.nash_conv for one in islice(runs, 25)) < least, solver


def test_three_players() -> None:
    form = SequenceForm.of("kuhn_poker(players=3)")
    runs = ExactPsro(form, "uniform").run(6)
    sizes = [one.sizes for one in runs]
    assert sizes[0] == (1, 1, 1)
    assert len(sizes) == 6


def test_payoffs_of_the_pools_are_those_of_the_game() -> None:
    form = SequenceForm.of("kuhn_poker(players=3)")
    psro = ExactPsro(form, "uniform")
    for _ in psro.run(4):
        pass
    rng = np.random.default_rng(8)
    for _ in range(10):
        members = [int(rng.integers(len(pool))) for pool in psro.pools]
        plans = [pool[one] for pool, one in zip(psro.pools, members, strict=True)]
        assert psro.payoffs[(slice(None), *members)] == pytest.approx(form.values(plans))


def test_games_that_have_no_sequence_form() -> None:
    with pytest.raises(ValueError, match="turn_based_simultaneous_game"):
        SequenceForm.of("matrix_rps")
    with pytest.raises(ValueError, match="no game named 'kuhnpoker'"):
        SequenceForm.of("kuhnpoker")
    rps = SequenceForm.of("turn_based_simultaneous_game(game=matrix_rps())")
    *_, last = ExactPsro(rps).run(10)
    assert last.nash_conv < 1e-9
