"""Advantage estimation for one policy's samples, with the baselines kept from step to step.

`algorithm.advantage` of the job chooses the function (`troupe/algorithms/registry.py`). Most need
only a sample and the rewards of its group. `reinforce_plus_plus` needs the rewards of the whole
step; `rae` a moving average of each agent's rewards, which is training state. `gae` comes from the
critic (critic.py), token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.trainer.learning.samples import Row, TrainingBatch, by_token, response_lengths
from troupe.algorithms.advantages import (
    AdvantageFunction,
    SampleBatch,
    batch_statistics,
    moved_baseline,
    rae,
)
from troupe.job import AlgorithmSpec

# Prefix of the baselines' names in the optimizer state, and of their metrics.
_PREFIX = "baseline/"


class AdvantageEstimator:
    """The estimator of the advantages of one policy's samples, with the state that they depend
    on."""

    def __init__(self, algorithm: AlgorithmSpec, function: AdvantageFunction | None) -> None:
        """Create the estimator. `function`: of `algorithm.advantage`; None: a critic computes
        advantages."""
        self._algorithm = algorithm
        self._function = function
        # Whether advantages need the rewards of all samples of the step (`measure`).
        self.needs_whole_step = bool(getattr(function, "whole_step", False))
        # `rae`: the baseline b_k by agent; zero at first, as in SPIRAL.
        self._baselines: dict[str, float] = {}
        # `rae`: rewards of the present step, by agent.
        self._rewards: dict[str, list[float]] = {}
        # `reinforce_plus_plus`: (mean, deviation) of the present step's rewards, by agent.
        self._statistics: dict[str, tuple[float, float]] = {}

    def measure(self, rows: Sequence[Row]) -> None:
        """Take reward statistics of all samples of a step, independent of their order."""
        rewards: dict[str, list[float]] = {}
        for row in rows:
            rewards.setdefault(self._pool(row), []).append(row.reward)
        self._statistics = {pool: batch_statistics(values) for pool, values in rewards.items()}

    def estimate(self, rows: Sequence[Row]) -> TrainingBatch:
        """Return `rows` with their advantages; each depends only on its own sample.

        Samples count towards the next baselines of `rae`: pass each sample once per step, or call
        `discard`. Raises `FunctionFault` for a user's function.
        """
        assert self._function is not None, "the critic computes these, token by token"
        pools = [self._statistics.get(self._pool(row), (0.0, 0.0)) for row in rows]
        step = torch.tensor(pools, dtype=torch.float64).reshape(-1, 2)
        if self._function is rae:
            for row in rows:
                self._rewards.setdefault(row.agent, []).append(row.reward)
        lengths = response_lengths(rows)
        behaviour = [row.behaviour for row in rows] or [np.empty(0, np.float32)]
        found = self._function(
            SampleBatch(
                torch.tensor([row.reward for row in rows], dtype=torch.float64),
                [row.group_rewards for row in rows],
                [row.agent for row in rows],
                torch.tensor([row.turn for row in rows]),
                torch.tensor(lengths),
                torch.from_numpy(np.concatenate(behaviour)),
                torch.tensor(
                    [self._baselines.get(row.agent, 0.0) for row in rows], dtype=torch.float64
                ),
                step[:, 0] if self.needs_whole_step else None,
                step[:, 1] if self.needs_whole_step else None,
                self._algorithm.scale_by_std,
            )
        )
        if len(found) == len(rows):
            return TrainingBatch(rows, found)
        return by_token(rows, found)

    def applied(self) -> None:
        """Update the baselines with the rewards of the step, after it was applied."""
        decay = self._algorithm.rae_decay
        for agent, rewards in self._rewards.items():
            before = self._baselines.get(agent, 0.0)
            self._baselines[agent] = moved_baseline(before, rewards, decay)

    def discard(self) -> None:
        """Discard the rewards of the current step."""
        self._rewards.clear()
        self._statistics.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the baselines, which are training state: float64 scalars by `baseline/{agent}`."""
        return {
            f"{_PREFIX}{agent}": torch.tensor(value, dtype=torch.float64)
            for agent, value in sorted(self._baselines.items())
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Restore the baselines in `state`, and return the other tensors of `state`."""
        self.discard()
        mine = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
        self._baselines = {name.removeprefix(_PREFIX): float(v) for name, v in mine.items()}
        return {name: value for name, value in state.items() if name not in mine}

    def step_state(self) -> dict[str, Any]:
        """Return the rewards of the current step as plain values, for suspension."""
        return {"rewards": self._rewards, "statistics": self._statistics}

    def restore_step(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `step_state`."""
        self._rewards = {agent: list(rewards) for agent, rewards in values["rewards"].items()}
        self._statistics = {pool: (one[0], one[1]) for pool, one in values["statistics"].items()}

    def metrics(self) -> dict[str, float]:
        """Return `baseline/<agent>`: the baseline that the step's rewards were compared with."""
        return {
            f"{_PREFIX}{agent}": self._baselines.get(agent, 0.0) for agent in sorted(self._rewards)
        }

    def _pool(self, row: Row) -> str:
        """Return the key of a row's pool, whose samples share statistics: its agent, or the
        policy."""
        return row.agent if self._algorithm.normalize_per_agent else ""
