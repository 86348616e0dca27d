"""Group-relative advantages (GRPO, Shao et al. 2024, section 4.1; Dr. GRPO, Liu et al. 2025).

Symbols: r_i reward of sample i, G(i) its group, A_i its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Keeps a group whose rewards nearly agree from blowing up; the value that TRL uses.
EPSILON = 1e-4


def group_statistics(
    group_rewards: Sequence[Sequence[float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (with Bessel's correction) of each group.

    `group_rewards`: n groups of any size >= 1. Returns two float64 [n]. A group of one, or
    one whose rewards are all equal, has a deviation of exactly zero.
    """
    sizes = torch.tensor([len(group) for group in group_rewards], dtype=torch.int64)
    if bool((sizes == 0).any()):
        raise ValueError("a group has no rewards: a sample belongs to its own group")
    n = len(group_rewards)
    flat = torch.tensor([r for group in group_rewards for r in group], dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(n), sizes)
    # Centred on the first member, so that equal rewards give zero and not rounding dust.
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
    epsilon: float = EPSILON,
) -> torch.Tensor:
    """A_i = (r_i - mean(G(i))) / (std(G(i)) + epsilon), or without the division.

    `rewards`: n samples; `group_rewards`: for each its group's final rewards, its own
    included. Returns float64 [n]. Independent of how samples are spread over micro-batches,
    since each sample brings its whole group's rewards. NaN rewards give NaN advantages, and so do
    finite ones whose squares are not.
    """
    if len(rewards) != len(group_rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(group_rewards)} groups")
    if not rewards:
        return torch.empty(0, dtype=torch.float64)
    mean, std = group_statistics(group_rewards)
    centred = torch.tensor(list(rewards), dtype=torch.float64) - mean
    if not scale_by_std:
        return centred
    # Divided by an infinite deviation they would be zero: nothing learned, and nobody told.
    return torch.where(torch.isfinite(std), centred / (std + epsilon), torch.nan)
