"""Policy objectives per token (PPO clip, GSPO, CISPO, DPPO), as losses.

Symbols: pi the policy being trained, mu the one that drew the tokens, rho_t = pi(a_t)/mu(a_t),
A_t advantage, l and h the lower and upper clip range (`clip_low`, `clip_high`).

ppo_clip: Schulman et al. 2017 (PPO), equation 7; h > l is DAPO's clip-higher (Yu et al. 2025,
    section 3.1). With d > 1 (`dual_clip`) the objective of a token with A_t < 0 is at least d A_t:
    dual-clip PPO, Ye et al. 2020 ("Mastering complex control in MOBA games"); so for
    `gspo`.
gspo: the same with the sequence's s(y) = prod_t rho_t^(1/|y|) for rho_t. Zheng et al. 2025 (GSPO),
    equations 5 to 7.
cispo: -min(rho_t, 1 + h) A_t log pi(a_t), the weight without gradient. MiniMax 2025 (MiniMax-M1),
    equations 4 and 5, whose lower bound is off as in the paper's runs.
dppo_mask: -min(rho_t, 20) A_t log pi(a_t), the weight without gradient, but nothing where pi(a_t)
    is further than h above mu(a_t), or than l below, and the gradient would widen it. Qi et al.
    2026 (DPPO), binary total variation; the bound on a rare token's weight is of the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from troupe.algorithms.logprobs import sequence_means
from troupe.algorithms.traits import LOSS_TRAITS, OWN_LOSS, LossTraits

# Bound on log-ratios: e^30 exceeds every cap and clip. Beyond it the exponential, or the square of
# a gradient, would overflow single precision, and the gradient of a clipped or masked token would
# be zero times infinity, which is NaN.
MAX_LOG_RATIO: Final = 30.0
# `dppo_mask`: cap on rho_t, so that a token that mu found impossible does not dominate the step.
MAX_WEIGHT = 20.0


@dataclass(frozen=True)
class Tokens:
    """Arguments of a loss or a correction: T response tokens, of whole samples only.

    Tensors are [T], on one device, of one floating-point type; they must not be changed in place.
    """

    # log pi(a_t). In a loss, gradients flow through it; in a correction, it is a constant, under
    # the weights at the beginning of the step if log-probs are recomputed.
    logprobs: torch.Tensor
    # log mu(a_t): under the engine's weights when it drew the token.
    behaviour_logprobs: torch.Tensor
    # Denominator of the loss's ratio: log mu(a_t), or the recomputed log pi_old(a_t).
    old_logprobs: torch.Tensor
    # A_t
    advantages: torch.Tensor
    # int64: number of each token's sample; tokens of a sample are adjacent. None: unknown.
    sequences: torch.Tensor | None = None
    # bool: the tokens that the correction keeps. The others are zero in all tensors of a loss.
    kept: torch.Tensor | None = None
    # The fields of these names in `algorithm`.
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction_cap: float = 2.0
    dual_clip: float | None = None

    @property
    def samples(self) -> torch.Tensor:
        """`sequences`. Raises ValueError if they are unknown."""
        if self.sequences is None:
            raise ValueError("this loss or correction needs `sequences`, the sample of each token")
        return self.sequences


# A loss: the loss of each token, [T], differentiable.
LossFunction = Callable[[Tokens], torch.Tensor]


def importance_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the importance ratio rho_t = pi(a_t) / mu(a_t), [T]; mu is the policy that drew the
    tokens."""
    return bounded_exp(logprobs - behaviour_logprobs)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(min(log_ratio, 30)), with a finite gradient everywhere.

    The gradient beyond the bound is exp(30), which keeps its direction, and zero at infinity. NaN
    stays NaN.
    """
    within = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    x = torch.where(torch.isfinite(log_ratio), log_ratio, torch.zeros_like(log_ratio))
    beyond = math.exp(MAX_LOG_RATIO) * (1.0 + (x - x.detach()))
    return torch.where(log_ratio > MAX_LOG_RATIO, beyond, within)


def sequence_level_ratio(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequences: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return GSPO's ratio s(y) = exp(mean_t log rho_t) of each token's sequence y, [T], with
    gradient.

    `sequences` as in `sequence_sums`, all of them whole. `kept`: bool [T], the tokens that a
    correction keeps, over which the mean is taken; None: all.
    """
    return bounded_exp(sequence_means(logprobs - behaviour_logprobs, sequences, kept))


def clipped_loss(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return PPO's loss -min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t) per token [T] (eq. 7).

    With `dual_clip` d the loss of a token with A_t < 0 is at most -d A_t.
    """
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return the mask of the tokens whose gradient the clip removes, bool [T]."""
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    if dual_clip is not None:
        below = below | ((advantages < 0) & (ratio > dual_clip))
    return above | below


def cispo_loss(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, clip_high: float
) -> torch.Tensor:
    """Return CISPO's loss -sg(min(rho_t, 1 + high)) A_t log pi(a_t) per token [T]; sg: stop
    gradient."""
    factors = ratio.detach().clamp(max=1.0 + clip_high) * advantages
    return -factors * where_weighed(logprobs, factors)


def where_weighed(logprobs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return `logprobs` where `factors` are not zero, else a constant zero.

    The log-prob of a token that pi finds impossible is -inf, and zero times infinity is NaN.
    """
    return torch.where(factors == 0, torch.zeros_like(logprobs), logprobs)


def is_outside(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
) -> torch.Tensor:
    """Return the mask of the tokens that `dppo_mask` removes from the loss, bool [T].

    These have pi(a_t) - mu(a_t) > high and A_t > 0, or mu(a_t) - pi(a_t) > low and A_t < 0. Unlike
    a clip of the ratio, this keeps rare tokens, whose ratio changes a lot while the distribution
    hardly changes.
    """
    moved = logprobs.detach().exp() - behaviour_logprobs.exp()
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))


def divergence_masked_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
) -> torch.Tensor:
    """Return DPPO's loss per token [T]: -sg(min(rho_t, 20)) A_t log pi(a_t), or zero if
    `is_outside`."""
    weights = importance_ratio(logprobs, behaviour_logprobs).detach().clamp(max=MAX_WEIGHT)
    outside = is_outside(logprobs, behaviour_logprobs, advantages, low, high)
    factors = torch.where(outside, torch.zeros_like(weights), weights * advantages)
    return -factors * where_weighed(logprobs, factors)


def ppo_clip(tokens: Tokens) -> torch.Tensor:
    """Return the loss `ppo_clip`."""
    ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)
    return clipped_loss(ratio, tokens.advantages, *_clips(tokens))


def gspo(tokens: Tokens) -> torch.Tensor:
    """Return the loss `gspo`."""
    return clipped_loss(_gspo_ratio(tokens), tokens.advantages, *_clips(tokens))


def cispo(tokens: Tokens) -> torch.Tensor:
    """Return the loss `cispo`."""
    ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)
    return cispo_loss(tokens.logprobs, ratio, tokens.advantages, tokens.clip_high)


def dppo_mask(tokens: Tokens) -> torch.Tensor:
    """Return the loss `dppo_mask`."""
    return divergence_masked_loss(
        tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.clip_low, tokens.clip_high
    )


def _clips(tokens: Tokens) -> tuple[float, float, float | None]:
    return tokens.clip_low, tokens.clip_high, tokens.dual_clip


def _gspo_ratio(tokens: Tokens) -> torch.Tensor:
    of_ratio = tokens.logprobs, tokens.old_logprobs
    return sequence_level_ratio(*of_ratio, tokens.samples, tokens.kept)


def _ratio(tokens: Tokens) -> torch.Tensor:
    return importance_ratio(tokens.logprobs, tokens.old_logprobs)


# By built-in loss: the mask bool [T] that `removed_by` returns.
_REMOVED: Final[Mapping[LossFunction, Callable[[Tokens], torch.Tensor]]] = {
    ppo_clip: lambda tokens: is_clipped(_ratio(tokens), tokens.advantages, *_clips(tokens)),
    gspo: lambda tokens: is_clipped(_gspo_ratio(tokens), tokens.advantages, *_clips(tokens)),
    cispo: lambda tokens: _ratio(tokens) > 1.0 + tokens.clip_high,
    dppo_mask: lambda tokens: is_outside(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.clip_low,
        tokens.clip_high,
    ),
}
LOSSES: Final[Mapping[str, LossFunction]] = {loss.__name__: loss for loss in _REMOVED}


def removed_by(loss: LossFunction, tokens: Tokens) -> torch.Tensor:
    """Return the mask of the tokens that `loss` clips or masks, or whose weight it caps, bool [T];
    what a user's own loss removes is unknown and not counted."""
    removed = _REMOVED.get(loss)
    if removed is None:
        return torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    return removed(tokens)


def traits_of(loss: LossFunction) -> LossTraits:
    """Return the traits of a built-in loss, or what holds of a user's own."""
    return LOSS_TRAITS[loss.__name__] if loss in _REMOVED else OWN_LOSS
