"""Importance corrections, for samples of older versions and of engines that round differently.

Symbols: mu the policy that drew the tokens, pi the one being trained, rho_t = pi(a_t)/mu(a_t),
rho(y) = prod_t rho_t over the tokens of a sample y. A correction turns them into a weight w_t of
each token's policy gradient, w_t A_t grad log pi(a_t). w_t is a constant: no gradient flows
through it.

truncated: w_t = min(rho_t, c). Token-level truncated importance sampling: Ionides 2008, "Truncated
    importance sampling"; Espeholt et al. 2018 (IMPALA), section 4.1. Its only bias comes from the
    cap. With one update per step pi is also the proximal policy, so this has the gradient of
    AReaL's decoupled objective (Fu et al. 2025, section 5.2); for several see losses.py.
masked: w_t = rho_t inside [1/c, c], else the token carries no loss at all (IcePop).
sequence_masked: w_t = rho(y) for all tokens of y where rho(y) is inside [1/c, c], else y carries no
    loss at all. The longer y is, the further rho(y) can be from 1, so it needs a larger c than
    single tokens do.

A loss that already weighs tokens by rho_t uses a mask only to decide which tokens carry a loss.
Masked tokens are removed before the loss is computed, so their gradient is exactly zero even if
their log-probs are infinite (`taken` in losses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from troupe.algorithms.logprobs import sequence_sums
from troupe.algorithms.objectives import Tokens, bounded_exp, importance_ratio, where_weighed

# A correction: the weight of each token, [T], without gradient; tokens of weight 0 have no loss.
CorrectionFunction = Callable[[Tokens], torch.Tensor]


def truncated_weights(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the truncated importance weights min(rho_t, cap), per token [T], without gradient.
    `cap` >= 1."""
    return ratio.detach().clamp(max=cap)


def masked_weights(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the masked importance weights [T], without gradient: rho where 1/cap <= rho <= cap,
    else 0.

    `ratio`: each token's own, or its sequence's (`sequence_ratio`). `cap` >= 1.
    """
    constant = ratio.detach()
    return torch.where(within(constant, cap), constant, torch.zeros_like(constant))


def within(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the mask of the tokens with 1/cap <= rho_t <= cap, bool [T]; false for NaN."""
    return (ratio >= 1.0 / cap) & (ratio <= cap)


def sequence_ratio(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, sequences: torch.Tensor
) -> torch.Tensor:
    """Return the importance ratio rho(y) of each token's sequence, [T]; `sequences` as in
    `sequence_sums`."""
    return bounded_exp(sequence_sums(logprobs - behaviour_logprobs, sequences))


def corrected_loss(
    logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the policy-gradient loss -w_t A_t per token [T], with the gradient -w_t A_t grad log
    pi(a_t)."""
    factors = weights * advantages
    x = where_weighed(logprobs, factors)
    # exp(x - detached x) has the value one and the derivative of x.
    return -factors * torch.exp(x - x.detach())


def truncated(tokens: Tokens) -> torch.Tensor:
    """Return the correction `truncated`."""
    return truncated_weights(_token_ratio(tokens), tokens.correction_cap)


def masked(tokens: Tokens) -> torch.Tensor:
    """Return the correction `masked`."""
    return masked_weights(_token_ratio(tokens), tokens.correction_cap)


def sequence_masked(tokens: Tokens) -> torch.Tensor:
    """Return the correction `sequence_masked`."""
    ratio = sequence_ratio(tokens.logprobs, tokens.behaviour_logprobs, tokens.samples)
    return masked_weights(ratio, tokens.correction_cap)


# `none` is the absence of one.
CORRECTIONS: Final[Mapping[str, CorrectionFunction | None]] = {
    "none": None,
    **{one.__name__: one for one in (truncated, masked, sequence_masked)},
}


def _token_ratio(tokens: Tokens) -> torch.Tensor:
    return importance_ratio(tokens.logprobs, tokens.behaviour_logprobs)
