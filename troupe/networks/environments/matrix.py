"""`MatrixGame`: a normal-form game with simultaneous actions and a payoff table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
                "payoffs have the shape [A, n, ..., n]: one table per agent",
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
