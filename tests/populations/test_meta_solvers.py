"""Meta-solvers against equilibria that are known, and against OpenSpiel's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.populations import NotZeroSum, nash_conv, pfsp, solve, values, zero_sum
from troupe.populations.games import as_payoffs, member_values, regrets
from troupe.populations.solvers import marginals, project, projected_replicator, stationary

PENNIES = zero_sum([[1, -1], [-1, 1]])
ROCK = zero_sum([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])
# Rock counts double: 1/4, 1/2, 1/4 (by hand: no player gains by a change).
HEAVY = zero_sum([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])
CHICKEN = np.array([[[0, 7], [2, 6]], [[0, 2], [7, 6]]], dtype=float)
DILEMMA = np.array([[[3, 0], [5, 1]], [[3, 5], [0, 1]]], dtype=float)


@pytest.mark.parametrize(
    ("game", "row"),
    [(PENNIES, [0.5, 0.5]), (ROCK, [1 / 3] * 3), (HEAVY, [0.25, 0.5, 0.25])],
)
def test_zero_sum_equilibria_that_are_known(game: np.ndarray, row: list[float]) -> None:
    for solver in ("zero_sum_nash", "nash"):
        found = solve(solver, game)
        assert found[0] == pytest.approx(row, abs=1e-9)
        assert found[1] == pytest.approx(row, abs=1e-9)
        assert nash_conv(game, found) < 1e-9
    for solver in ("projected_replicator", "fictitious_play"):
        assert solve(solver, game)[0] == pytest.approx(row, abs=0.05)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_no_zero_sum_game_is_exploited(seed: int, rows: int, columns: int) -> None:
    game = zero_sum(np.random.default_rng(seed).normal(size=(rows, columns)).round(1))
    found = solve("zero_sum_nash", game)
    assert nash_conv(game, found) < 1e-8
    for one, size in zip(found, (rows, columns), strict=True):
        assert one.shape == (size,)
        assert one.min() >= 0
        assert one.sum() == pytest.approx(1)


def test_general_sum_games() -> None:
    assert solve("nash", DILEMMA)[0] == pytest.approx([0, 1], abs=1e-6)
    assert nash_conv(CHICKEN, solve("nash", CHICKEN)) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_three_players(seed: int) -> None:
    game = np.random.default_rng(seed).normal(size=(3, 2, 3, 2))
    found = solve("nash", game)
    assert nash_conv(game, found) < 1e-4 * np.ptp(game)
    assert all((a == b).all() for a, b in zip(found, solve("nash", game), strict=True))


def test_a_game_that_is_not_zero_sum_is_refused_by_name() -> None:
    for game in (DILEMMA, np.zeros((3, 2, 2, 2))):
        with pytest.raises(NotZeroSum, match="alpha_rank"):
            solve("zero_sum_nash", game)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 3), (2, 1, 4), (3, 2, 1, 2)])
def test_degenerate_games_have_solutions(shape: tuple[int, ...]) -> None:
    """All payoffs equal; one strategy."""
    for solver in ("nash", "alpha_rank", "projected_replicator", "fictitious_play", "uniform"):
        found = solve(solver, np.ones(shape))  # type: ignore[arg-type]
        assert [one.sum() for one in found] == pytest.approx([1] * (len(shape) - 1))
        assert nash_conv(np.ones(shape), found) == 0


@pytest.mark.parametrize(
    ("payoffs", "told"),
    [
        (np.zeros((2, 3)), "shape"),
        (np.zeros((2, 0, 3)), "shape"),
        ([[[1.0, float("nan")]], [[0.0, 1.0]]], r"\[0, 0, 1\] is nan"),
    ],
)
def test_invalid_payoffs_are_refused(payoffs: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        solve("nash", payoffs)
    with pytest.raises(ValueError, match="no meta-solver"):
        solve("best", PENNIES)  # type: ignore[arg-type]


def test_values_by_hand() -> None:
    profile = [np.array([0.5, 0.5]), np.array([1.0, 0.0])]
    assert values(DILEMMA, profile).tolist() == [4.0, 1.5]
    assert member_values(DILEMMA, profile, 0).tolist() == [3.0, 5.0]
    assert regrets(DILEMMA, profile).tolist() == [1.0, 1.5]


def test_replicator_dynamics_are_openspiels() -> None:
    reference = pytest.importorskip("open_spiel.python.algorithms.projected_replicator_dynamics")
    game = as_payoffs(CHICKEN)
    ours = projected_replicator(game, iterations=500, rate=0.05, least=1e-3)
    theirs = reference.projected_replicator_dynamics(
        list(game / np.ptp(game)), prd_iterations=500, prd_dt=0.05, prd_gamma=1e-3
    )
    for mine, their in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(their, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.sampled_from([0.0, 0.01, 0.1]))
def test_a_projection_is_the_nearest_distribution(vector: list[float], least: float) -> None:
    point = np.array(vector)
    found = project(point, least)
    assert found.sum() == pytest.approx(1)
    assert found.min() >= least - 1e-12
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = least + (1 - least * len(point)) * rng.dirichlet(np.ones(len(point)))
        assert np.linalg.norm(found - point) <= np.linalg.norm(other - point) + 1e-9


def test_alpha_rank_of_known_games() -> None:
    pytest.importorskip("open_spiel.python.egt.alpharank")
    for share in solve("alpha_rank", ROCK):
        assert share == pytest.approx([1 / 3] * 3, abs=1e-3)
    assert solve("alpha_rank", DILEMMA)[0] == pytest.approx([0, 1], abs=1e-6)
    joint = stationary(as_payoffs(DILEMMA), alpha=10.0)
    assert joint.shape == (2, 2)
    assert [one.sum() for one in marginals(joint)] == pytest.approx([1, 1])


def test_pfsp_prefers_opponents_that_win() -> None:
    rates = [0.0, 0.5, 1.0]
    assert pfsp(rates) == pytest.approx([0.8, 0.2, 0])
    assert pfsp(rates, weighting="variance").tolist() == [0, 1, 0]
    assert pfsp(rates, weighting="linear") == pytest.approx([2 / 3, 1 / 3, 0])
    assert pfsp([1.0, 1.0]).tolist() == [0.5, 0.5], "all beaten: anybody"
    for wrong in ([], [1.1], [float("nan")]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            pfsp(wrong)
    with pytest.raises(ValueError, match="'soft'"):
        pfsp(rates, weighting="soft")  # type: ignore[arg-type]
    assert solve("latest", HEAVY)[1].tolist() == [0, 0, 1]
