"""Pure mathematics of policy optimization: torch tensors in, tensors out."""

from troupe.algorithms.advantages import group_advantages, group_statistics
from troupe.algorithms.corrections import (
    Correction,
    corrected_loss,
    masked_weights,
    truncated_weights,
)
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.algorithms.losses import (
    clipped_loss,
    grpo_loss_sum,
    importance_ratio,
    is_clipped,
    k3_kl,
    normalizer,
    policy_loss,
    token_weights,
)
from troupe.algorithms.statistics import TokenStatistics

__all__ = [
    "Correction",
    "TokenStatistics",
    "clipped_loss",
    "corrected_loss",
    "group_advantages",
    "group_statistics",
    "grpo_loss_sum",
    "importance_ratio",
    "is_clipped",
    "k3_kl",
    "masked_weights",
    "normalizer",
    "policy_loss",
    "selective_log_softmax",
    "token_weights",
    "truncated_weights",
]
