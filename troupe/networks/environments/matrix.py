"""Games of payoff tables: `MatrixGame`, with simultaneous actions; `TwoStep`, the smallest game on
which additive value factorization fails (QMIX, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from troupe.networks.vector import Actions, Observed, Spaces, Stepped
from troupe.rpc.errors import InvalidArgument


class MatrixGame:
    """A normal-form game, played `steps` times. Agents see the last joint action, one-hot (zeros at
    first)."""

    def __init__(self, copies: int, payoffs: Sequence[Any], steps: int = 1) -> None:
        """`payoffs` [A, n, ..., n]: rewards per agent by the joint action. Raises InvalidArgument
        for other shapes."""
        table = np.asarray(payoffs, np.float32)
        if table.ndim < 2 or len(set(table.shape[1:])) > 1 or len(table) != table.ndim - 1:
            raise InvalidArgument(
                "payoffs must have the shape [A, n, ..., n]: one table per agent",
                field="environment.payoffs",
                value=list(table.shape),
            )
        self._table = table
        self.copies = copies
        self.agents = tuple(f"agent_{i}" for i in range(len(table)))
        self._actions = table.shape[1]
        # Observation and state are the last joint action.
        seen = len(table) * self._actions
        self.spaces = Spaces(observation=seen, state=seen, actions=self._actions, steps=steps)
        self._last = np.zeros((copies, seen), np.float32)
        self._step = 0

    def reset(self, seed: int) -> Observed:
        """Begin a game; nothing is random."""
        self._last[:] = 0
        self._step = 0
        return self._observe()

    def step(self, actions: Actions) -> Stepped:
        """Play one joint action, int64 [B, A]."""
        joint = np.asarray(actions, np.int64)
        rewards = self._table[(slice(None), *joint.T)].T
        self._last = np.eye(self._actions, dtype=np.float32)[joint].reshape(self.copies, -1)
        self._step += 1
        over = np.full(self.copies, self._step >= self.spaces.steps)
        return Stepped(self._observe(), rewards, over, np.zeros(self.copies, np.bool_))

    def close(self) -> None:
        """Nothing to release."""

    def _observe(self) -> Observed:
        return Observed(np.repeat(self._last[:, None], len(self.agents), axis=1), self._last)


# Reward of both agents in the second step, by the game that agent_0 chose and both actions. The
# second game is worth 8; with additive values it appears to be worth 6.5 (table 1).
_PAYOFFS: Final = np.array([[[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)


class TwoStep:
    """Two agents see which of three states it is. In the first, agent_0's action chooses the game
    of the second step (Rashid et al. 2018). The optimum is 8; additive values find 7."""

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
