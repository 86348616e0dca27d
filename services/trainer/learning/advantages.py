"""Advantage estimation for one policy's samples, with the baselines kept from step to step.

`algorithm.advantage` of the job chooses the function (`troupe/algorithms/registry.py`). Most need
only a sample and the rewards of its group; some all samples of the group, and so does
`baseline_weight: trajectory`. `reinforce_plus_plus` needs the rewards of the whole step; `rae` a
moving average of each agent's rewards, which is training state. `gae` comes from the critic
(critic.py), token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from services.trainer.learning.samples import (
    Row,
    TrainingBatch,
    by_token,
    chains_of,
    earned_in,
    malformed,
    response_lengths,
)
from troupe.algorithms.advantages import (
    AdvantageFunction,
    SampleBatch,
    batch_statistics,
    moved_baseline,
    rae,
)
from troupe.job import AlgorithmSpec
from troupe.job.sections.algorithm import StepGroupsSpec

# Prefix of the baselines' names in the optimizer state, and of their metrics.
_PREFIX = "baseline/"
# Rewards by pool (an agent, a group, all) and, if a trajectory counts once, by trajectory.
Pools = dict[str, dict[str, list[float]]]


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
        self._by_trajectory = algorithm.baseline_weight == "trajectory"
        self._of_groups = bool(getattr(function, "whole_group", False))
        # Other advantages look at no prompt, and hashing long ones takes time.
        self._reads_prompts = self._of_groups or ":" in algorithm.advantage
        # Whether the rewards of a group are computed from its rows.
        self._recounts = self._by_trajectory or (function is not None and algorithm.kl_penalty > 0)
        # Whether `estimate` must be given whole groups.
        self.needs_whole_groups = self._of_groups or self._recounts
        # `rae`: the baseline b_k by agent; zero at first, as in SPIRAL.
        self._baselines: dict[str, float] = {}
        # `rae`: rewards of the present step, by agent.
        self._rewards: Pools = {}
        # `reinforce_plus_plus`: (mean, deviation) of the present step's rewards, by agent.
        self._statistics: dict[str, tuple[float, float]] = {}

    def measure(self, rows: Sequence[Row]) -> None:
        """Take reward statistics of all samples of a step, independent of their order."""
        rewards: Pools = {}
        self._add(rewards, ((self._pool(row), row) for row in rows))
        self._statistics = {
            pool: self._mean_and_deviation(entries) for pool, entries in rewards.items()
        }

    def estimate(self, rows: Sequence[Row]) -> TrainingBatch:
        """Return `rows` with their advantages; each depends only on its own sample, or on its own
        group with `needs_whole_groups`.

        Samples count towards the next baselines of `rae`: pass each sample once per step, or call
        `discard`. Raises `FunctionFault` for a user's function.
        """
        assert self._function is not None, "the critic computes these, token by token"
        if self._function is rae:
            self._add(self._rewards, ((row.agent, row) for row in rows))
        found = self._function(self._batch(rows))
        if len(found) == len(rows):
            return TrainingBatch(rows, found)
        return by_token(rows, found)

    def _batch(self, rows: Sequence[Row]) -> SampleBatch:
        pools = [self._statistics.get(self._pool(row), (0.0, 0.0)) for row in rows]
        step = torch.tensor(pools, dtype=torch.float64).reshape(-1, 2)
        behaviour = [row.behaviour for row in rows] or [np.empty(0, np.float32)]
        group_rewards: list[Sequence[float]] = [row.group_rewards for row in rows]
        prompts = [row.prompt_digest for row in rows] if self._reads_prompts else []
        step_groups = self._algorithm.step_groups or StepGroupsSpec()
        column = step_groups.observation
        own, within, groups = None, None, Pools()
        if self._recounts:
            self._add(groups, ((row.group, row) for row in rows))
            means = {name: sorted(self._counted(entries)) for name, entries in groups.items()}
            group_rewards = [means[row.group] for row in rows]
        if self._by_trajectory:
            own = _float64(_mean(groups[row.group][row.trajectory]) for row in rows)
            variances = {name: _within(entries) for name, entries in groups.items()}
            within = _float64(variances[row.group] for row in rows)
        return SampleBatch(
            rewards=_float64(row.net_reward for row in rows),
            group_rewards=group_rewards,
            agents=[row.agent for row in rows],
            turns=torch.tensor([row.turn for row in rows]),
            lengths=torch.tensor(response_lengths(rows)),
            behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour)),
            baselines=_float64(self._baselines.get(row.agent, 0.0) for row in rows),
            step_mean=step[:, 0] if self.needs_whole_step else None,
            step_std=step[:, 1] if self.needs_whole_step else None,
            scale_by_std=self._algorithm.scale_by_std,
            queries=[row.query for row in rows],
            trajectories=[row.trajectory for row in rows],
            groups=[row.group for row in rows],
            chains=[row.chain for row in rows],
            by_trajectory=self._by_trajectory,
            prompts=prompts,
            columns=[row.columns for row in rows],
            own_entries=own,
            group_within=within,
            earned=_earned(rows) if self._of_groups else None,
            observations=prompts if column is None else [_observed(row, column) for row in rows],
            step_groups=step_groups,
        )

    def _add(self, pools: Pools, rows: Iterable[tuple[str, Row]]) -> None:
        """Add the rewards of rows to the pools of these names."""
        for pool, row in rows:
            entry = row.trajectory if self._by_trajectory else ""
            pools.setdefault(pool, {}).setdefault(entry, []).append(row.net_reward)

    def _counted(self, entries: Mapping[str, Sequence[float]]) -> list[float]:
        """Return the rewards of a pool that count: of each sample, or the mean of each
        trajectory's."""
        if self._by_trajectory:
            return [_mean(rewards) for rewards in entries.values()]
        return [reward for rewards in entries.values() for reward in rewards]

    def _mean_and_deviation(self, entries: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        mean, std = batch_statistics(self._counted(entries))
        return mean, math.sqrt(std * std + _within(entries)) if self._by_trajectory else std

    def applied(self) -> None:
        """Update the baselines with the rewards of the step, after it was applied."""
        decay = self._algorithm.rae_decay
        for agent, rewards in self._rewards.items():
            before = self._baselines.get(agent, 0.0)
            self._baselines[agent] = moved_baseline(before, self._counted(rewards), decay)

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
        self._rewards = {
            agent: {entry: list(rewards) for entry, rewards in entries.items()}
            for agent, entries in values["rewards"].items()
        }
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


def _mean(rewards: Sequence[float]) -> float:
    """Return the mean, independent of the order, and exact where all rewards are equal."""
    return batch_statistics(rewards)[0] if len(rewards) > 1 else rewards[0]


def _within(entries: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over trajectories of the variance of their rewards, independent of the order
    and exactly zero where each trajectory has equal ones.

    Agents with rewards of their own differ within a trajectory. Without this, trajectories with
    equal means would have a deviation of zero, by which those differences would be divided.
    """
    variances = []
    for rewards in entries.values():
        if len(rewards) > 1:
            _, deviation = batch_statistics(rewards)
            variances.append(deviation * deviation * (len(rewards) - 1) / len(rewards))
    return sum(sorted(variances)) / len(entries)


def _earned(rows: Sequence[Row]) -> torch.Tensor:
    """Return what each turn earned (`earned_in`), float64 [n]; zero without a response."""
    earned = torch.zeros(len(rows), dtype=torch.float64)
    for chain in chains_of(rows):
        for i, own in zip(chain, earned_in(rows, chain), strict=True):
            earned[i] = own - (rows[i].reward - rows[i].net_reward)
    return earned


def _observed(row: Row, column: str) -> Hashable:
    """Return the value of a row's column, equal for equal values. Raises FailedPrecondition of kind
    "malformed_sample"."""
    if column not in row.columns:
        raise malformed(
            row.sample_id,
            f"it has no column {column}, which algorithm.step_groups.observation names",
            f"Set reply.columns[{column!r}] for every turn that is trained.",
        )
    value = row.columns[column]
    if isinstance(value, np.ndarray):
        contents = np.ascontiguousarray(value)
        return value.dtype.str, value.shape, xxhash.xxh3_128_digest(contents.data)
    return json.dumps(value, sort_keys=True)


def _float64(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
