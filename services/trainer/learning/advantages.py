"""What rewards are measured against: the advantages of one policy's samples without a critic.

Most follow from a sample and its group. Two need more: `reinforce_plus_plus` the rewards of the
whole step, and `rae` what its agents earned in the steps before, which is training state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from services.trainer.learning.samples import Row
from troupe.algorithms import (
    batch_advantages,
    batch_statistics,
    group_advantages,
    leave_one_out_advantages,
    moved_baseline,
    role_advantages,
)
from troupe.job import AlgorithmSpec

# Before the agent's name, among the optimizer's tensors.
_PREFIX = "baseline/"


class Baselines:
    """The advantages of `algorithm.advantage`, and what they keep from step to step."""

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        self._algorithm = algorithm
        # `rae`: b_k by agent; zero at first, as in SPIRAL.
        self._roles: dict[str, float] = {}
        # `rae`: rewards of the step that accumulates, by agent.
        self._seen: dict[str, list[float]] = {}
        # `reinforce_plus_plus`: (mean, deviation) of the step's samples, by agent.
        self._batch: dict[str, tuple[float, float]] = {}

    @property
    def needs_whole_step(self) -> bool:
        """Whether advantages are known only with all of the step's samples (`measure`)."""
        return self._algorithm.advantage == "reinforce_plus_plus"

    def measure(self, rows: Sequence[Row]) -> None:
        """Take the statistics of all samples of a step; their order leaves no trace."""
        rewards: dict[str, list[float]] = {}
        for row in rows:
            rewards.setdefault(self._pool(row), []).append(row.reward)
        self._batch = {pool: batch_statistics(values) for pool, values in rewards.items()}

    def advantages(self, rows: Sequence[Row]) -> torch.Tensor:
        """float64 [n]. The same for a sample whatever it comes with.

        Samples count towards `rae`'s next baselines: pass each once a step, or `discard`.
        """
        rewards = [row.reward for row in rows]
        groups = [row.group_rewards for row in rows]
        match self._algorithm.advantage:
            case "grpo":
                scale = self._algorithm.scale_by_std
                return group_advantages(rewards, groups, scale_by_std=scale)
            case "dr_grpo":
                return group_advantages(rewards, groups, scale_by_std=False)
            case "rloo":
                return leave_one_out_advantages(rewards, groups)
            case "reinforce_plus_plus":
                pools = [self._batch[self._pool(row)] for row in rows]
                mean, std = [mean for mean, _ in pools], [std for _, std in pools]
                return batch_advantages(rewards, mean, std)
            case "rae":
                for row in rows:
                    self._seen.setdefault(row.agent, []).append(row.reward)
                return role_advantages(rewards, [self._roles.get(r.agent, 0.0) for r in rows])
            case "gae":
                raise AssertionError("a critic tells advantages token by token")

    def applied(self) -> None:
        """The step was applied: its rewards move the baselines of the next."""
        decay = self._algorithm.rae_decay
        for agent, rewards in self._seen.items():
            self._roles[agent] = moved_baseline(self._roles.get(agent, 0.0), rewards, decay)

    def discard(self) -> None:
        """Forget the step that accumulates."""
        self._seen.clear()
        self._batch.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on: float64 scalars by `baseline/{agent}`."""
        return {
            f"{_PREFIX}{agent}": torch.tensor(value, dtype=torch.float64)
            for agent, value in sorted(self._roles.items())
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take over what `state` gave; returns the tensors that are not of it."""
        self.discard()
        mine = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
        self._roles = {name.removeprefix(_PREFIX): float(value) for name, value in mine.items()}
        return {name: value for name, value in state.items() if name not in mine}

    def of_step(self) -> dict[str, Any]:
        """What accumulates within a step, as plain values, for a policy that is suspended."""
        return {"seen": self._seen, "batch": self._batch}

    def resume_step(self, values: Mapping[str, Any]) -> None:
        """Inverse of `of_step`."""
        self._seen = {agent: list(rewards) for agent, rewards in values["seen"].items()}
        self._batch = {pool: (one[0], one[1]) for pool, one in values["batch"].items()}

    def metrics(self) -> dict[str, float]:
        """`baseline/<agent>`: what the step's rewards were measured against."""
        return {f"{_PREFIX}{agent}": self._roles.get(agent, 0.0) for agent in sorted(self._seen)}

    def _pool(self, row: Row) -> str:
        return row.agent if self._algorithm.normalize_per_agent else ""
