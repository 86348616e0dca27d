"""alpha-rank: how often a population that mutates rarely is found in each profile."""

from __future__ import annotations

import numpy as np

from troupe.populations.games import Array, Profile, as_payoffs, uniform


def alpha_rank(payoffs: object, *, alpha: float | None = None) -> Profile:
    """The marginals of the stationary distribution of alpha-rank (Omidshafiei et al. 2019).

    `alpha`: the intensity of selection; None: raised until the ranking no longer changes, as their
    sweep does. Computed by OpenSpiel. Raises ImportError without it, ValueError for payoffs that
    are none.
    """
    game = as_payoffs(payoffs)
    if game[0].size == 1 or not np.ptp(game, axis=tuple(range(1, game.ndim))).any():
        return uniform(game)  # nobody is better anywhere
    return marginals(stationary(game, alpha))


def stationary(payoffs: Array, alpha: float | None = None) -> Array:
    """The stationary distribution over joint profiles [k_1, ..., k_n]."""
    try:
        from open_spiel.python.egt import alpharank
    except ImportError as error:
        raise ImportError(
            "alpha-rank is OpenSpiel's: pip install 'troupe[games]', or choose another solver"
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
    """Each player's own distribution [k_i] in a joint one."""
    axes = range(joint.ndim)
    return [joint.sum(axis=tuple(other for other in axes if other != one)) for one in axes]
