"""A loss, an advantage and a correction that Troupe does not have; job.yaml names them by path."""

from __future__ import annotations

import torch

from troupe.algorithms.advantages import SampleBatch
from troupe.algorithms.logprobs import sequence_means
from troupe.algorithms.objectives import Tokens, importance_ratio


def soft_clip(tokens: Tokens) -> torch.Tensor:
    """Replace PPO's clip by a sigmoid of the ratio, steeper for negative advantages (SAPO, Gao et
    al. 2025): the gradient fades as the ratio leaves 1, but never becomes zero."""
    ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)
    steepness = torch.where(tokens.advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(steepness * (ratio - 1.0)) * 4.0 / steepness * tokens.advantages


def over_median(samples: SampleBatch) -> torch.Tensor:
    """Return rewards relative to the median of their group, which one outlier does not move."""
    medians = [torch.tensor(group).quantile(0.5) for group in samples.group_rewards]
    return samples.rewards - torch.stack(medians).to(samples.rewards)


def sequence_band(tokens: Tokens) -> torch.Tensor:
    """Keep only samples whose tokens' mean log-ratio is near zero."""
    drift = sequence_means(tokens.logprobs - tokens.behaviour_logprobs, tokens.samples)
    return (drift.abs() < 0.1).to(drift.dtype)
