"""Pure mathematics of policy optimization: torch tensors in, tensors out."""

from troupe.algorithms.advantages import (
    Advantage,
    batch_advantages,
    batch_statistics,
    group_advantages,
    group_statistics,
    leave_one_out_advantages,
    moved_baseline,
    role_advantages,
)
from troupe.algorithms.corrections import (
    Correction,
    corrected_loss,
    masked_weights,
    sequence_ratio,
    truncated_weights,
)
from troupe.algorithms.logprobs import selective_log_softmax, sequence_means, sequence_sums
from troupe.algorithms.losses import (
    Normalize,
    grpo_loss_sum,
    k3_kl,
    normalizer,
    policy_loss,
    token_weights,
)
from troupe.algorithms.objectives import (
    Loss,
    cispo_loss,
    clipped_loss,
    divergence_masked_loss,
    importance_ratio,
    is_clipped,
    is_outside,
    sequence_level_ratio,
)
from troupe.algorithms.statistics import TokenStatistics
from troupe.algorithms.values import ValueStatistics, clipped_values, gae, value_loss

__all__ = [
    "Advantage",
    "Correction",
    "Loss",
    "Normalize",
    "TokenStatistics",
    "ValueStatistics",
    "batch_advantages",
    "batch_statistics",
    "cispo_loss",
    "clipped_loss",
    "clipped_values",
    "corrected_loss",
    "divergence_masked_loss",
    "gae",
    "group_advantages",
    "group_statistics",
    "grpo_loss_sum",
    "importance_ratio",
    "is_clipped",
    "is_outside",
    "k3_kl",
    "leave_one_out_advantages",
    "masked_weights",
    "moved_baseline",
    "normalizer",
    "policy_loss",
    "role_advantages",
    "selective_log_softmax",
    "sequence_level_ratio",
    "sequence_means",
    "sequence_ratio",
    "sequence_sums",
    "token_weights",
    "truncated_weights",
    "value_loss",
]
