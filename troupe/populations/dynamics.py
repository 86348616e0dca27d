"""Meta-strategies that play goes to: replicator dynamics and fictitious play."""

from __future__ import annotations

import numpy as np

from troupe.populations.games import Array, Profile, as_payoffs, member_values, uniform


def projected_replicator(
    payoffs: object, *, iterations: int = 4_000, rate: float = 0.05, least: float = 1e-6
) -> Profile:
    """Average of the projected replicator dynamics (Lanctot et al. 2017, section 3.2).

        x_i <- P(x_i + dt x_i (u_i - x_i u_i))

    with P the nearest distribution of which nothing is below `least` (their gamma). `rate` (their
    dt) is in units of the spread of the payoffs, so that their scale does not matter.
    """
    game = as_payoffs(payoffs)
    least = min(least, 1.0 / max(game.shape[1:]))
    # Payoffs relative to their spread: without one, nothing moves.
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
    """The distribution nearest to `vector` [k] with no part below `least` (Wang and
    Carreira-Perpinan 2013, with a floor)."""
    size = len(vector)
    count = np.arange(1, size + 1)
    falling = np.sort(vector)[::-1]
    shift = (1.0 - np.cumsum(falling) - (size - count) * least) / count
    last = int(np.flatnonzero(falling + shift > least)[-1]) if size else 0
    found: Array = np.maximum(vector + shift[last], least)
    return found


def fictitious_play(payoffs: object, *, iterations: int = 2_000) -> Profile:
    """How often each member was the best response to all play before (Brown 1951).

    All players answer at once; the first answer is to the uniform profile.
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
