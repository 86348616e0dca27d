"""`TwoStep`: the smallest game that additive value factorization fails (QMIX, section 5.1)."""

from __future__ import annotations

from typing import Final

import numpy as np

from troupe.networks.vector import Actions, Observed, Spaces, Stepped

# Reward of both in the second step, by the game that agent_0 chose and both actions. The second
# game is worth 8; with additive values it appears to be worth 6.5 (table 1).
_PAYOFFS: Final = np.array([[[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)


class TwoStep:
    """Two agents see which of three states it is. In the first, agent_0's action chooses the game
    of the second step (Rashid et al. 2018). The optimum is 8; a sum of two values
    finds 7."""

    agents = ("agent_0", "agent_1")
    # Observation and state are one-hot.
    spaces = Spaces(observation=3, state=3, actions=2, steps=2)

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self._where = np.zeros(copies, np.int64)

    def reset(self, seed: int) -> Observed:
        """Begin a game; nothing is random."""
        self._where = np.zeros(self.copies, np.int64)
        return self._observe()

    def step(self, actions: Actions) -> Stepped:
        """Play actions int64 [B, 2]."""
        over = self._where > 0
        payoffs = _PAYOFFS[np.maximum(self._where, 1) - 1, actions[:, 0], actions[:, 1]]
        rewards = np.repeat(np.where(over, payoffs, np.float32(0))[:, None], 2, axis=1)
        self._where = np.where(over, self._where, 1 + actions[:, 0])
        return Stepped(self._observe(), rewards, over, np.zeros(self.copies, np.bool_))

    def close(self) -> None:
        """Nothing to release."""

    def _observe(self) -> Observed:
        state = np.eye(3, dtype=np.float32)[self._where]
        return Observed(np.repeat(state[:, None], 2, axis=1), state)
