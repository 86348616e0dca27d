"""Prioritised fictitious self-play: opponents that can teach something come more often."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from troupe.populations.games import Array

Weighting = Literal["hard", "variance", "linear"]

_WEIGHTINGS: Final = {
    "hard": lambda wins, power: (1.0 - wins) ** power,
    "variance": lambda wins, power: wins * (1.0 - wins),
    "linear": lambda wins, power: 1.0 - wins,
}


def pfsp(win_rates: object, *, weighting: Weighting = "hard", power: float = 2.0) -> Array:
    """Probabilities [k] of meeting each opponent, from how often we beat it, in [0, 1].

    f(x) = (1 - x)^p ("hard": those we lose to), x (1 - x) ("variance": our equals) or 1 - x
    ("linear"), normalized (Vinyals et al. 2019, methods, "PFSP"). All of weight zero: uniform.

    Raises ValueError for rates outside [0, 1] or a weighting that there is not.
    """
    wins = np.asarray(win_rates, dtype=np.float64)
    if wins.ndim != 1 or not len(wins) or not ((wins >= 0) & (wins <= 1)).all():
        raise ValueError(f"win rates are between 0 and 1, one for each opponent, not {win_rates}")
    if weighting not in _WEIGHTINGS:
        raise ValueError(f"there is no weighting {weighting!r}; use one of {list(_WEIGHTINGS)}")
    weights: Array = _WEIGHTINGS[weighting](wins, power)
    total = float(weights.sum())
    if total <= 0.0:
        return np.full(len(wins), 1.0 / len(wins))
    return weights / total
