"""Sums over the tokens of each sequence, given back to each of its tokens."""

from __future__ import annotations

import torch


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` over its sequence, [T]; differentiable.

    `sequences`: int64 [T], equal for neighbours of one sequence, whose tokens lie together.
    """
    segments = _segments(sequences)
    # T is a bound on the number of sequences that no device has to be asked for.
    sums = torch.zeros_like(values).index_add(0, segments, values)
    return sums.index_select(0, segments)


def sequence_means(
    values: torch.Tensor, sequences: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """For each token the mean of `values` over its sequence, [T]; differentiable.

    `kept`: bool [T], the tokens that count; None: all. Where none does the mean is zero.
    """
    if kept is None:
        counted = torch.ones_like(values, requires_grad=False)
    else:
        counted = kept.to(values.dtype)
        values = torch.where(kept, values, torch.zeros_like(values))
    return sequence_sums(values, sequences) / sequence_sums(counted, sequences).clamp(min=1.0)


def _segments(sequences: torch.Tensor) -> torch.Tensor:
    """Sequences counted from zero in the order in which they come, int64 [T]."""
    fresh = torch.ones_like(sequences)
    fresh[1:] = (sequences[1:] != sequences[:-1]).to(sequences.dtype)
    return fresh.cumsum(0) - 1
