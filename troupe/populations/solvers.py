"""Meta-solvers by name: payoffs of a meta-game in, a distribution over each pool out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

from troupe.populations.alpha_rank import alpha_rank
from troupe.populations.dynamics import fictitious_play, projected_replicator
from troupe.populations.games import Profile, as_payoffs, uniform
from troupe.populations.nash import nash, zero_sum_nash

MetaSolver = Literal[
    "nash",
    "zero_sum_nash",
    "alpha_rank",
    "projected_replicator",
    "fictitious_play",
    "uniform",
    "latest",
]


def _uniform(payoffs: object) -> Profile:
    return uniform(as_payoffs(payoffs))


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
    "uniform": _uniform,
    # Naive self-play: against the newest member alone.
    "latest": _latest,
}
assert set(_SOLVERS) == set(get_args(MetaSolver))


def solve(solver: MetaSolver, payoffs: object, **options: Any) -> Profile:
    """The meta-strategy of each player.

    Raises ValueError for a solver that there is not, for payoffs that are none, and for a game
    that the solver is not for (`NotZeroSum`); ImportError where a library is missing.
    """
    if solver not in _SOLVERS:
        raise ValueError(f"there is no meta-solver {solver!r}; use one of {sorted(_SOLVERS)}")
    return _SOLVERS[solver](payoffs, **options)
