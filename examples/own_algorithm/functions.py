"""A loss, an advantage and a correction that Troupe does not have; job.yaml names them by path."""

from __future__ import annotations

import torch

from troupe.algorithms.advantages import SampleBatch
from troupe.algorithms.logprobs import sequence_means
from troupe.algorithms.objectives import Tokens, importance_ratio


def soft_clip(tokens: Tokens) -> torch.Tensor:
    """A sigmoid of the ratio in place of PPO's clip, steeper for negative advantages (SAPO, Gao et
    al. 2025): the gradient fades where the ratio leaves 1, and never becomes zero."""
    ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)
    steepness = torch.where(tokens.advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(steepness * (ratio - 1.0)) * 4.0 / steepness * tokens.advantages


def over_median(samples: SampleBatch) -> torch.Tensor:
    """The reward relative to the median of its group, which one outlier does not move."""
    medians = [torch.tensor(group).quantile(0.5) for group in samples.group_rewards]
    return samples.rewards - torch.stack(medians).to(samples.rewards)


def sequence_band(tokens: Tokens) -> torch.Tensor:
    """SampleBatch count only while the mean log-ratio of their tokens is near zero."""
    drift = sequence_means(tokens.logprobs - tokens.behaviour_logprobs, tokens.samples)
    return (drift.abs() < 0.1).to(drift.dtype)
