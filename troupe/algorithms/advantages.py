"""Advantages: the reward of a sample relative to a baseline, without a critic.

Symbols: r_i reward of sample i, G(i) its group, B the samples of its step, A_i its advantage.

grpo: A_i = (r_i - mean G(i)) / (std G(i) + epsilon). Shao et al. 2024, section 4.1.
dr_grpo: A_i = r_i - mean G(i). Liu et al. 2025 ("Understanding R1-Zero-like"), section 3.2.
rloo: A_i = r_i - mean of the others in G(i). Ahmadian et al. 2024 ("Back to basics"), section 3.
reinforce_plus_plus: A_i = (r_i - mean B) / (std B + epsilon). Hu et al. 2025 (REINFORCE++),
    section 3.
maxrl: A_i = (r_i - mean G(i)) / mean G(i), or 0 if the mean is 0; rewards of 0 or 1. Tajwar et al.
    2026 ("Maximum likelihood reinforcement learning"), the estimator with its control variate: with
    groups of N samples its expectation is sum_{k<N} 1/k grad pass@k, the first terms of the
    gradient of log p, p the probability of success.
rae: A_i = r_i - b_k, b_k a moving average of the returns of role k. Liu et al. 2025 (SPIRAL),
    section 3.3.

By default a group contains samples of one agent, so the first three are normalised per agent, as
Dr. MAS (Feng et al. 2026) requires. All but `reinforce_plus_plus` are known as soon as a sample's
group is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from troupe.job.sections.algorithm import StepGroupsSpec

# Bounds the advantages of a group whose rewards are nearly equal; the same value as in TRL.
EPSILON = 1e-4


@dataclass(frozen=True)
class SampleBatch:
    """Arguments of an advantage: n samples of one policy.

    Micro-batches are formed as samples arrive. A sample's advantage may therefore depend only on
    its own entries, which include its group's rewards and the statistics of its step, and, if the
    function has the attribute `whole_group`, on the entries of its group, all of which are here.
    """

    # float64 [n]
    rewards: torch.Tensor
    # n lists: the rewards of each sample's whole group, including its own, in order of size. With
    # `baseline_weight: trajectory` the mean reward of each trajectory in the group.
    group_rewards: Sequence[Sequence[float]]
    # n names.
    agents: Sequence[str]
    # int64 [n]: position of the turn in its trajectory, and number of its response tokens (T_i).
    turns: torch.Tensor
    lengths: torch.Tensor
    # float32 [T], T = sum of T_i, sample after sample: log-probs of the engine that drew them.
    behaviour_logprobs: torch.Tensor
    # float64 [n]: `rae`'s moving average of each sample's agent; zeros with other advantages.
    baselines: torch.Tensor
    # float64 [n]: mean and deviation of all rewards of the step, of the sample's agent or of the
    # policy (`normalize_per_agent`). None unless the function has the attribute `whole_step`.
    step_mean: torch.Tensor | None = None
    step_std: torch.Tensor | None = None
    # The field of this name in `algorithm`.
    scale_by_std: bool = True
    # n ids: of the query, of the trajectory, and of the group (unique in the step).
    queries: Sequence[str] = ()
    trajectories: Sequence[str] = ()
    groups: Sequence[str] = ()
    # n names: turns of one trajectory and agent with equal chain follow one another.
    chains: Sequence[str] = ()
    # Whether each trajectory counts once in a baseline (`baseline_weight`).
    by_trajectory: bool = False
    # n 64-bit hashes of the prompts' tokens and payloads: equal prompts have equal ones.
    prompts: Sequence[int] = ()
    # n mappings: the columns of each sample that `algorithm.columns` names and the workflow set;
    # arrays (bfloat16 as its bits), or JSON values.
    columns: Sequence[Mapping[str, Any]] = ()
    # float64 [n]: each sample's own entry in `group_rewards`; None: its reward.
    own_entries: torch.Tensor | None = None
    # float64 [n]: with `baseline_weight: trajectory` the variance of rewards within a trajectory,
    # averaged over the trajectories of each group; None: 0.
    group_within: torch.Tensor | None = None
    # float64 [n]: what each turn earned, its agent's reward with the last turn of a chain. None
    # unless the function has the attribute `whole_group`.
    earned: torch.Tensor | None = None
    # n observations, equal ones of equal turns: the column that `algorithm.step_groups` names, or
    # the prompts; and that section.
    observations: Sequence[Hashable] = ()
    step_groups: StepGroupsSpec = field(default_factory=StepGroupsSpec)


# An advantage: of each sample [n], or of each response token [T], sample after sample.
AdvantageFunction = Callable[[SampleBatch], torch.Tensor]


def group_statistics(
    group_rewards: Sequence[Sequence[float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and standard deviation (with Bessel's correction) of each group.

    `group_rewards`: n groups of any size >= 1. Returns two float64 [n]. A group of one, or
    one whose rewards are all equal, has a deviation of exactly zero.
    """
    sizes = torch.tensor([len(group) for group in group_rewards], dtype=torch.int64)
    if bool((sizes == 0).any()):
        raise ValueError("a group has no rewards: a sample belongs to its own group")
    n = len(group_rewards)
    flat = torch.tensor([r for group in group_rewards for r in group], dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(n), sizes)
    # Centred on the first member, so that equal rewards give exactly zero despite rounding.
    first = torch.tensor([group[0] for group in group_rewards], dtype=torch.float64)
    delta = flat - first[index]
    shift = torch.zeros(n, dtype=torch.float64).index_add_(0, index, delta) / sizes
    squares = torch.zeros(n, dtype=torch.float64)
    squares.index_add_(0, index, (delta - shift[index]) ** 2)
    return first + shift, torch.sqrt(squares / (sizes - 1).clamp(min=1))


def group_advantages(
    rewards: Sequence[float],
    group_rewards: Sequence[Sequence[float]],
    *,
    scale_by_std: bool = True,
    within: torch.Tensor | None = None,
    epsilon: float = EPSILON,
) -> torch.Tensor:
    """Return the GRPO advantages A_i = (r_i - mean(G(i))) / (std(G(i)) + epsilon), float64 [n].

    `scale_by_std` False leaves the division out (Dr. GRPO). `rewards`: of n samples;
    `group_rewards`: for each sample the final rewards of its group, including its own, so that the
    result does not depend on how samples are distributed over micro-batches. `within`, float64 [n]:
    variance to add to the variance of each group's entries (`SampleBatch.group_within`). NaN
    rewards give NaN advantages, and so do finite rewards whose squares overflow.
    """
    _same_length(rewards, group_rewards)
    if not rewards:
        return torch.empty(0, dtype=torch.float64)
    mean, std = group_statistics(group_rewards)
    centred = _float64(rewards) - mean
    if within is not None:
        std = torch.sqrt(std**2 + within)
    return _scaled(centred, std, epsilon) if scale_by_std else centred


def leave_one_out_advantages(
    rewards: Sequence[float],
    group_rewards: Sequence[Sequence[float]],
    own_entries: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return the RLOO advantages A_i = r_i - mean(G(i) without i), float64 [n]; zero in a group of
    one.

    Arguments as in `group_advantages`; `own_entries`: the entry of each sample in its group, which
    is left out (default: its reward). Computed as r_i - mean(G(i)) + (o_i - mean(G(i))) / (n - 1),
    n = |G(i)|, o_i the own entry.
    """
    centred = group_advantages(rewards, group_rewards, scale_by_std=False)
    own = group_advantages(own_entries or rewards, group_rewards, scale_by_std=False)
    sizes = _float64([len(group) for group in group_rewards])
    return torch.where(sizes > 1, centred + own / (sizes - 1).clamp(min=1), centred - own)


def batch_statistics(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean and standard deviation of a step's rewards, bitwise independent of their
    order.

    `rewards` must not be empty.
    """
    mean, std = group_statistics([sorted(rewards)])
    return float(mean), float(std)


def batch_advantages(
    rewards: Sequence[float],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    epsilon: float = EPSILON,
) -> torch.Tensor:
    """Return the REINFORCE++ advantages A_i = (r_i - mean_i) / (std_i + epsilon), float64 [n].

    `mean`, `std`: for each sample, the `batch_statistics` of all samples of its step or of its
    agent's samples.
    """
    _same_length(rewards, mean)
    return _scaled(_float64(rewards) - _float64(mean), _float64(std), epsilon)


def role_advantages(rewards: Sequence[float], baselines: Sequence[float]) -> torch.Tensor:
    """Return the role-conditioned (RAE) advantages A_i = r_i - b_k(i), float64 [n].

    `baselines`: for each sample, the moving average of its role.
    """
    _same_length(rewards, baselines)
    return _float64(rewards) - _float64(baselines)


def moved_baseline(baseline: float, rewards: Sequence[float], decay: float) -> float:
    """Return the RAE baseline b_k after a step with these `rewards` of role k; independent of their
    order.

    Equals n updates b <- decay b + (1 - decay) r with every r replaced by the mean of the n:
    decay^n b + (1 - decay^n) mean. SPIRAL's released code subtracts b from r and then updates it,
    trajectory by trajectory. This implementation uses the b from before the step for all its
    samples, so that A does not depend on the order of samples, and b does not depend on the sample
    from which it is subtracted.
    """
    if not rewards:
        return baseline
    kept = decay ** len(rewards)
    return kept * baseline + (1.0 - kept) * batch_statistics(rewards)[0]


def likelihood_advantages(
    rewards: Sequence[float], group_rewards: Sequence[Sequence[float]]
) -> torch.Tensor:
    """Return the MaxRL advantages A_i = (r_i - mean(G(i))) / mean(G(i)), float64 [n]; zero if the
    mean is zero.

    Arguments as in `group_advantages`; rewards must not be negative: NaN in a group with a negative
    one, whose mean is no rate of success.
    """
    centred = group_advantages(rewards, group_rewards, scale_by_std=False)
    mean = _float64(rewards) - centred
    lowest = _float64([min(group) for group in group_rewards])
    found = torch.where(mean == 0, torch.zeros_like(mean), centred / mean)
    return torch.where(lowest < 0, torch.nan, found)


def grpo(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `grpo`."""
    return group_advantages(
        samples.rewards.tolist(),
        samples.group_rewards,
        scale_by_std=samples.scale_by_std,
        within=samples.group_within,
    )


def dr_grpo(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `dr_grpo`."""
    rewards = samples.rewards.tolist()
    return group_advantages(rewards, samples.group_rewards, scale_by_std=False)


def rloo(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `rloo`."""
    own = None if samples.own_entries is None else samples.own_entries.tolist()
    return leave_one_out_advantages(samples.rewards.tolist(), samples.group_rewards, own)


def reinforce_plus_plus(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `reinforce_plus_plus`."""
    assert samples.step_mean is not None, "it has the attribute `whole_step`"
    assert samples.step_std is not None, "as the mean"
    mean, std = samples.step_mean.tolist(), samples.step_std.tolist()
    return batch_advantages(samples.rewards.tolist(), mean, std)


reinforce_plus_plus.whole_step = True  # type: ignore[attr-defined]


def rae(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `rae`."""
    return role_advantages(samples.rewards.tolist(), samples.baselines.tolist())


def maxrl(samples: SampleBatch) -> torch.Tensor:
    """Return the advantage `maxrl`."""
    return likelihood_advantages(samples.rewards.tolist(), samples.group_rewards)


def _scaled(centred: torch.Tensor, std: torch.Tensor, epsilon: float) -> torch.Tensor:
    # Division by an infinite deviation would give advantage zero, and hide overflowing rewards.
    return torch.where(torch.isfinite(std), centred / (std + epsilon), torch.nan)


def _float64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _same_length(rewards: Sequence[float], others: Sequence[object]) -> None:
    if len(rewards) != len(others):
        raise ValueError(f"{len(rewards)} rewards but {len(others)} groups or baselines")
