"""Pure mathematics of policy optimization: torch tensors in, tensors out."""

from troupe.algorithms.advantages import group_advantages, group_statistics
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.algorithms.losses import (
    clipped_loss,
    grpo_loss_sum,
    importance_ratio,
    is_clipped,
    k3_kl,
    normalizer,
    token_weights,
)
from troupe.algorithms.statistics import TokenStatistics

__all__ = [
    "TokenStatistics",
    "clipped_loss",
    "group_advantages",
    "group_statistics",
    "grpo_loss_sum",
    "importance_ratio",
    "is_clipped",
    "k3_kl",
    "normalizer",
    "selective_log_softmax",
    "token_weights",
]
