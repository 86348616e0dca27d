"""Nash equilibria of meta-games."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.optimize import least_squares, linprog

from troupe.populations.dynamics import projected_replicator
from troupe.populations.games import (
    Array,
    Profile,
    as_payoffs,
    is_zero_sum,
    member_values,
    nash_conv,
    uniform,
)

# Below this nobody gains by a change, up to rounding.
_EXACT: Final = 1e-7


class NotZeroSum(ValueError):
    """A solver of zero-sum games was given another one."""


def zero_sum_nash(payoffs: object) -> Profile:
    """Equilibrium of a two-player zero-sum game, by linear programming (von Neumann).

    Degenerate games (all payoffs equal, one strategy) have one, too: some vertex of the optimal
    face. Raises NotZeroSum, ValueError.
    """
    game = as_payoffs(payoffs)
    if game.shape[0] != 2 or not is_zero_sum(game):
        raise NotZeroSum(
            f"this game of {game.shape[0]} players is not a two-player zero-sum game; use the "
            "solver nash, alpha_rank or projected_replicator"
        )
    return [_best_floor(game[0]), _best_floor(game[1].T)]


def nash(payoffs: object, *, starts: int = 16, seed: int = 0) -> Profile:
    """An approximate equilibrium of an n-player general-sum game, exact in small games.

    Two-player zero-sum games go to the linear program. Otherwise the profile with the least
    `nash_conv` of: the projected replicator dynamics, and minima of McKelvey's function (the sum
    of the squared gains of all members, which is 0 exactly at equilibria) from `starts` points.
    Deterministic for a `seed`. Raises ValueError.
    """
    game = as_payoffs(payoffs)
    if game.shape[0] == 2 and is_zero_sum(game):
        return zero_sum_nash(game)
    scale = float(np.ptp(game)) or 1.0
    game = game / scale
    best = uniform(game)
    if (least := nash_conv(game, best)) > _EXACT:
        best = projected_replicator(game, iterations=2_000, rate=0.05)
        least = nash_conv(game, best)
    rng = np.random.default_rng(seed)
    for start in range(starts):
        if least <= _EXACT:
            break
        first = best if start == 0 else [rng.dirichlet(np.ones(k)) for k in game.shape[1:]]
        found = _descend(game, first)
        if (left := nash_conv(game, found)) < least:
            best, least = found, left
    return best


def _best_floor(matrix: Array) -> Array:
    """The mixture of rows [k] whose worst column is best."""
    rows, columns = matrix.shape
    # max v such that x^T M >= v in every column, x a distribution.
    found = linprog(
        c=np.r_[np.zeros(rows), -1.0],
        A_ub=np.c_[-matrix.T, np.ones(columns)],
        b_ub=np.zeros(columns),
        A_eq=np.r_[np.ones(rows), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, None)] * rows + [(None, None)],
        method="highs",
    )
    if not found.success:  # finite payoffs have a solution
        raise ArithmeticError(f"the linear program has no solution: {found.message}")
    return _normalized(found.x[:rows])


def _descend(game: Array, first: Profile) -> Profile:
    sizes = [len(one) for one in first]
    ends = np.cumsum(sizes)[:-1]

    def profile(point: Array) -> Profile:
        # Squares, not exponentials: a member may have probability zero.
        return [part**2 / max(float((part**2).sum()), 1e-300) for part in np.split(point, ends)]

    def gains(point: Array) -> Array:
        mixed = profile(point)
        found = []
        for player, own in enumerate(mixed):
            each = member_values(game, mixed, player)
            found.append(np.maximum(each - each @ own, 0.0))
        # Keeps the points from drifting, which changes no profile.
        lengths = [part @ part - 1.0 for part in np.split(point, ends)]
        return np.concatenate([*found, np.array(lengths)])

    start = np.sqrt(np.maximum(np.concatenate(first), 1e-6))
    solved = least_squares(gains, start, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=400)
    return [_normalized(np.where(part < 1e-12, 0.0, part)) for part in profile(solved.x)]


def _normalized(weights: Array) -> Array:
    found = np.maximum(weights, 0.0)
    result: Array = found / found.sum()
    return result
