"""Meta-solvers: from the payoffs of a meta-game to a distribution over each player's pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np
from scipy.optimize import least_squares, linprog

from troupe.populations.games import (
    Array,
    Profile,
    as_payoffs,
    is_zero_sum,
    member_values,
    nash_conv,
    uniform,
)

# A profile with a smaller NashConv counts as an equilibrium up to rounding.
_EXACT: Final = 1e-7


def alpha_rank(payoffs: object, *, alpha: float | None = None) -> Profile:
    """Return the marginals of the stationary distribution of alpha-rank (Omidshafiei et al. 2019).

    `alpha`: the intensity of selection; None: raised until the ranking no longer changes. Computed
    by OpenSpiel: raises ImportError without it. Raises ValueError for invalid payoffs.
    """
    game = as_payoffs(payoffs)
    if game[0].size == 1 or not np.ptp(game, axis=tuple(range(1, game.ndim))).any():
        return uniform(game)  # all payoffs are equal
    return marginals(stationary(game, alpha))


def stationary(payoffs: Array, alpha: float | None = None) -> Array:
    """Return the stationary distribution over joint profiles [k_1, ..., k_n]."""
    try:
        from open_spiel.python.egt import alpharank
    except ImportError as error:
        raise ImportError(
            f"alpha-rank needs OpenSpiel ({error}): run `pip install 'troupe-rl[alpha-rank]'` on "
            "the orchestrator's host, or choose another solver"
        ) from error
    tables = list(payoffs / (float(np.ptp(payoffs)) or 1.0))
    if alpha is None:
        found = alpharank.sweep_pi_vs_epsilon(tables)
    else:
        found = alpharank.compute(tables, alpha=alpha)[2]
    shares: Array = np.maximum(np.asarray(found, dtype=np.float64), 0.0)
    joint: Array = (shares / shares.sum()).reshape(payoffs.shape[1:])
    return joint


def marginals(joint: Array) -> Profile:
    """Return the marginal distribution of each player [k_i]."""
    axes = range(joint.ndim)
    return [joint.sum(axis=tuple(other for other in axes if other != one)) for one in axes]


def projected_replicator(
    payoffs: object, *, iterations: int = 4_000, rate: float = 0.05, least: float = 1e-6
) -> Profile:
    """Return the average of the projected replicator dynamics (Lanctot et al. 2017, section 3.2).

        x_i <- P(x_i + dt x_i (u_i - x_i u_i))

    P projects on distributions with no part below `least` (their gamma). `rate` (their dt) is in
    units of the spread of the payoffs, so that their scale does not matter.
    """
    game = as_payoffs(payoffs)
    least = min(least, 1.0 / max(game.shape[1:]))
    # Payoffs relative to their spread; if all are equal, the dynamics do not move.
    spread = float(np.ptp(game))
    game = game / spread if spread else np.zeros_like(game)
    now = uniform(game)
    total = [one.copy() for one in now]
    for _ in range(iterations):
        each = [member_values(game, now, player) for player in range(len(now))]
        now = [
            project(own + rate * own * (u - u @ own), least)
            for own, u in zip(now, each, strict=True)
        ]
        for summed, own in zip(total, now, strict=True):
            summed += own
    return [one / one.sum() for one in total]


def project(vector: Array, least: float = 0.0) -> Array:
    """Return the projection of `vector` on the distributions [k] with no part below `least`.

    Wang and Carreira-Perpinan 2013, with a floor.
    """
    size = len(vector)
    count = np.arange(1, size + 1)
    falling = np.sort(vector)[::-1]
    shift = (1.0 - np.cumsum(falling) - (size - count) * least) / count
    last = int(np.flatnonzero(falling + shift > least)[-1]) if size else 0
    found: Array = np.maximum(vector + shift[last], least)
    return found


def fictitious_play(payoffs: object, *, iterations: int = 2_000) -> Profile:
    """Return fictitious play (Brown 1951): frequencies of members as best responses to past play.

    Players respond simultaneously, first to the uniform profile.
    """
    game = as_payoffs(payoffs)
    counts = [np.zeros(size) for size in game.shape[1:]]
    beliefs = uniform(game)
    for played in range(1, iterations + 1):
        answers = [
            int(member_values(game, beliefs, player).argmax()) for player in range(len(beliefs))
        ]
        for count, answer in zip(counts, answers, strict=True):
            count[answer] += 1.0
        beliefs = [count / played for count in counts]
    return beliefs


class NotZeroSum(ValueError):
    """A solver for two-player zero-sum games was given another game."""


def zero_sum_nash(payoffs: object) -> Profile:
    """Return a Nash equilibrium of a two-player zero-sum game, by linear programming (von Neumann).

    Returns a vertex if there are several. Raises NotZeroSum, ValueError.
    """
    game = as_payoffs(payoffs)
    if game.shape[0] != 2 or not is_zero_sum(game):
        raise NotZeroSum(
            f"this game of {game.shape[0]} players is not a two-player zero-sum game; use the "
            "solver nash, alpha_rank or projected_replicator"
        )
    return [_best_floor(game[0]), _best_floor(game[1].T)]


def nash(payoffs: object, *, starts: int = 16, seed: int = 0) -> Profile:
    """Return an approximate equilibrium of an n-player general-sum game, exact in small games.

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
    """Return the maximin mixture of rows [k], which maximizes the payoff in its worst column."""
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
    """Return a local minimum of McKelvey's function from the profile `first`."""
    sizes = [len(one) for one in first]
    ends = np.cumsum(sizes)[:-1]

    def profile(point: Array) -> Profile:
        # Parametrized by squares, not exponentials, so that probabilities can be exactly zero.
        return [part**2 / max(float((part**2).sum()), 1e-300) for part in np.split(point, ends)]

    def gains(point: Array) -> Array:
        mixed = profile(point)
        found = []
        for player, own in enumerate(mixed):
            each = member_values(game, mixed, player)
            found.append(np.maximum(each - each @ own, 0.0))
        # A penalty that keeps the free scale of the parametrization at 1.
        lengths = [part @ part - 1.0 for part in np.split(point, ends)]
        return np.concatenate([*found, np.array(lengths)])

    start = np.sqrt(np.maximum(np.concatenate(first), 1e-6))
    solved = least_squares(gains, start, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=400)
    return [_normalized(np.where(part < 1e-12, 0.0, part)) for part in profile(solved.x)]


def _normalized(weights: Array) -> Array:
    found = np.maximum(weights, 0.0)
    result: Array = found / found.sum()
    return result


MetaSolver = Literal[
    "nash",
    "zero_sum_nash",
    "alpha_rank",
    "projected_replicator",
    "fictitious_play",
    "uniform",
    "latest",
]


def _latest(payoffs: object) -> Profile:
    found = uniform(as_payoffs(payoffs))
    for one in found:
        one[:] = 0.0
        one[-1] = 1.0
    return found


_SOLVERS: Final[dict[str, Callable[..., Profile]]] = {
    "nash": nash,
    "zero_sum_nash": zero_sum_nash,
    "alpha_rank": alpha_rank,
    "projected_replicator": projected_replicator,
    "fictitious_play": fictitious_play,
    "uniform": lambda payoffs: uniform(as_payoffs(payoffs)),
    # Naive self-play against the newest member alone.
    "latest": _latest,
}
assert set(_SOLVERS) == set(get_args(MetaSolver))


def solve(solver: MetaSolver, payoffs: object, **options: Any) -> Profile:
    """Return the meta-strategy of each player, by the solver of this name.

    Raises ValueError for an unknown solver, invalid payoffs, and a game that the solver does not
    support (`NotZeroSum`); ImportError if a library is missing.
    """
    if solver not in _SOLVERS:
        raise ValueError(f"there is no meta-solver {solver!r}; use one of {sorted(_SOLVERS)}")
    return _SOLVERS[solver](payoffs, **options)
