"""Policy losses as SUMS over response tokens, so that micro-batches add up exactly.

A step's loss is `(1/N) sum_t w_t l_t` over all its tokens t. Micro-batches accumulate the
gradient of `sum_t w_t l_t`; the one division by N comes when the step is complete and N is
known. Symbols: rho_t = pi(a_t)/mu(a_t) importance ratio, A_t advantage, w_t token weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from troupe.algorithms.corrections import (
    Correction,
    corrected_loss,
    masked_weights,
    truncated_weights,
    within,
)

Normalize = Literal["token", "sequence"]


def token_weights(lengths: Sequence[int], normalize: Normalize) -> torch.Tensor:
    """w_t of all tokens of sequences with these response lengths; float64 [sum(lengths)].

    "token": 1; "sequence": 1/length, so that every sequence counts alike.
    """
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    if normalize == "token":
        return torch.ones(int(sizes.sum()), dtype=torch.float64)
    return torch.repeat_interleave(1.0 / sizes.clamp(min=1).to(torch.float64), sizes)


def normalizer(lengths: Sequence[int], normalize: Normalize) -> int:
    """N's share of these sequences: their tokens, or how many have any token."""
    if normalize == "token":
        return sum(lengths)
    return sum(1 for length in lengths if length > 0)


def importance_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """rho_t [T] = pi(a_t) / mu(a_t), mu being the policy that generated the tokens."""
    return torch.exp(logprobs - behaviour_logprobs)


def clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """-min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t), per token [T] (PPO, eq. 7)."""
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Bool [T]: tokens whose gradient the clip removes."""
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return above | below


def k3_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(pi || ref) at each token [T]: q - log q - 1 with q = ref(a_t)/pi(a_t).

    Never negative, unbiased over a_t ~ pi (Schulman's k3).
    """
    log_q = reference_logprobs - logprobs
    return torch.exp(log_q) - log_q - 1.0


def policy_loss(
    logprobs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> torch.Tensor:
    """The policy term of each token [T]: clipped, or corrected as `correction` says."""
    if correction == "none":
        return clipped_loss(ratio, advantages, clip_low, clip_high)
    weigh = truncated_weights if correction == "truncated" else masked_weights
    return corrected_loss(logprobs, advantages, weigh(ratio, correction_cap))


def grpo_loss_sum(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction = "none",
    correction_cap: float = 2.0,
    reference_logprobs: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy: torch.Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> torch.Tensor:
    """sum_t w_t (policy_t + beta KL_t - c H_t), a scalar; the caller divides by N.

    All arguments are [T]; gradients flow through `logprobs` and `entropy`. Under `masked` the
    tokens that are masked carry no KL and no entropy either; N counts them all the same, so
    that it does not depend on the weights. `truncated` weighs the policy term only.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    loss = policy_loss(
        logprobs,
        ratio,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        correction=correction,
        correction_cap=correction_cap,
    )
    if reference_logprobs is not None and kl_coefficient > 0:
        loss = loss + kl_coefficient * k3_kl(logprobs, reference_logprobs)
    if entropy is not None and entropy_coefficient > 0:
        loss = loss - entropy_coefficient * entropy
    if correction == "masked":
        kept = within(ratio.detach(), correction_cap)
        loss = torch.where(kept, loss, torch.zeros_like(loss))
    return (loss * weights).sum()
