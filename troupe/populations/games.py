"""Meta-games: normal-form games in which a player's strategies are the members of its pool.

Shapes in this package: `payoffs` [n, k_1, ..., k_n] are floats; [i, a_1, ..., a_n] is the payoff of
player i when each player j plays its member a_j. A *profile* is one distribution [k_i] per player.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Profile = list[Array]


def as_payoffs(payoffs: object) -> Array:
    """Convert `payoffs` to float64 and check it.

    Raises ValueError for a wrong shape or a payoff that is not finite.
    """
    found = np.asarray(payoffs, dtype=np.float64)
    if found.ndim < 2 or found.shape[0] != found.ndim - 1 or 0 in found.shape:
        raise ValueError(
            f"payoffs of n players have the shape [n, k_1, ..., k_n] with all k >= 1, not "
            f"{list(found.shape)}"
        )
    if not np.isfinite(found).all():
        where = np.argwhere(~np.isfinite(found))[0]
        raise ValueError(f"the payoff at {where.tolist()} is {found[tuple(where)]}")
    return found


def zero_sum(matrix: object) -> Array:
    """Return the payoffs [2, k, l] of the two-player zero-sum game whose row player gets
    `matrix`."""
    rows = np.asarray(matrix, dtype=np.float64)
    found: Array = np.stack([rows, -rows])
    return found


def is_zero_sum(payoffs: Array) -> bool:
    """Return whether the game is constant-sum: payoffs have the same sum in every cell."""
    totals = payoffs.sum(axis=0)
    scale = max(1.0, float(np.abs(payoffs).max()))
    return bool(np.ptp(totals) <= 1e-9 * scale)


def uniform(payoffs: Array) -> Profile:
    """Return the profile in which all members are equally likely."""
    return [np.full(size, 1.0 / size) for size in payoffs.shape[1:]]


def member_values(payoffs: Array, profile: Sequence[Array], player: int) -> Array:
    """Return the expected payoff of each member of `player` [k_i] while the others play
    `profile`."""
    found: Array = payoffs[player]
    for other in range(len(profile) - 1, -1, -1):
        if other != player:
            found = np.tensordot(found, profile[other], axes=([other], [0]))
    return found


def values(payoffs: Array, profile: Sequence[Array]) -> Array:
    """Return the expected payoff of each player [n] when all play `profile`."""
    players = range(len(profile))
    return np.array([member_values(payoffs, profile, i) @ profile[i] for i in players])


def regrets(payoffs: Array, profile: Sequence[Array]) -> Array:
    """Return the regret of each player [n]: its gain if it switched to its best member."""
    found = []
    for player, own in enumerate(profile):
        each = member_values(payoffs, profile, player)
        found.append(each.max() - each @ own)
    gains: Array = np.maximum(np.array(found), 0.0)
    return gains


def nash_conv(payoffs: Array, profile: Sequence[Array]) -> float:
    """NashConv: the sum of `regrets`; 0 at a meta-game equilibrium (Lanctot et al. 2017)."""
    return float(regrets(payoffs, profile).sum())
