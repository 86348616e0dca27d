"""The loss of a step as a SUM over response tokens, so that micro-batches add up exactly.

A step's loss is `(1/N) sum_t w_t l_t` over all its tokens t. Micro-batches accumulate the
gradient of `sum_t w_t l_t`; the one division by N comes when the step is complete and N is
known. Symbols: rho_t = pi(a_t)/mu(a_t) importance ratio, A_t advantage, w_t token weight.

*Recomputed old log-probs*: the loss's ratio is pi/pi_old, where pi_old has the weights that the
step began with, not those that drew the tokens. A correction then multiplies each token's loss by a
constant weight derived from pi_old/mu. With `ppo_clip` and `truncated` that is decoupled PPO:
Hilton et al. 2022 ("Batch size-invariance for policy optimization"), section 3, with pi_old the
proximal and mu the behaviour policy; Fu et al. 2025 (AReaL), section 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from troupe.algorithms.corrections import (
    Correction,
    corrected_loss,
    masked_weights,
    sequence_ratio,
    truncated_weights,
    within,
)
from troupe.algorithms.objectives import (
    MAX_LOG_RATIO,
    Loss,
    bounded_exp,
    cispo_loss,
    clipped_loss,
    divergence_masked_loss,
    importance_ratio,
    sequence_level_ratio,
)

Normalize = Literal["token", "sequence", "constant"]


def token_weights(lengths: Sequence[int], normalize: Normalize) -> torch.Tensor:
    """Token weights w_t of sequences with these response lengths; float64 [sum(lengths)].

    "token", "constant": 1; "sequence": 1/length, so that all sequences have equal weight.
    """
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    if normalize != "sequence":
        return torch.ones(int(sizes.sum()), dtype=torch.float64)
    return torch.repeat_interleave(1.0 / sizes.clamp(min=1).to(torch.float64), sizes)


def normalizer(lengths: Sequence[int], normalize: Normalize, constant: int = 1) -> int:
    """The contribution of these sequences to the loss normalizer N.

    "token": their number of tokens; "sequence": the number of sequences with at least one token;
    "constant": `constant` per such sequence (Dr. GRPO, Liu et al. 2025, section 3.2).
    """
    if normalize == "token":
        return sum(lengths)
    present = sum(1 for length in lengths if length > 0)
    return present * constant if normalize == "constant" else present


def k3_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(pi || ref) at each token [T]: q - log q - 1 with q = ref(a_t)/pi(a_t).

    Never negative, unbiased over a_t ~ pi (Schulman's k3). q is bounded by `bounded_exp`.
    """
    log_q = reference_logprobs - logprobs
    return bounded_exp(log_q) - log_q.clamp(max=MAX_LOG_RATIO) - 1.0


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
    """The `ppo_clip` loss per token [T]: with PPO's clip, or with `correction` in its place.

    `ratio`: rho_t of each token; under `sequence_masked` rho(y) of its sequence.
    """
    if correction == "none":
        return clipped_loss(ratio, advantages, clip_low, clip_high)
    weigh = truncated_weights if correction == "truncated" else masked_weights
    return corrected_loss(logprobs, advantages, weigh(ratio, correction_cap))


def correction_ratio(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequences: torch.Tensor | None,
    correction: Correction,
) -> torch.Tensor:
    """The ratio that the correction bounds, [T]: rho(y) for `sequence_masked`, else rho_t.

    Raises ValueError if `sequence_masked` comes without `sequences`.
    """
    if correction != "sequence_masked":
        return importance_ratio(logprobs, behaviour_logprobs)
    return sequence_ratio(logprobs, behaviour_logprobs, _given(sequences, correction))


def grpo_loss_sum(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    loss: Loss = "ppo_clip",
    sequences: torch.Tensor | None = None,
    correction: Correction = "none",
    correction_cap: float = 2.0,
    old_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy: torch.Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> torch.Tensor:
    """The summed loss sum_t w_t (policy_t + beta KL_t - c H_t), a scalar; the caller divides by N.

    All arguments are [T]; gradients flow through `logprobs` and `entropy`. `sequences` (int64, see
    `sequence_sums`) is the sequence id of each token; `gspo` and `sequence_masked` need it, with
    whole sequences.

    A masked token has no KL and no entropy term either, does not count in its sequence's ratio
    under `gspo`, and has a gradient of exactly zero even if its log-probs are not finite. N counts
    it nevertheless, so that N does not depend on the weights. `truncated` scales the policy term
    only. `old_logprobs`: those of the weights that the step began with, if the loss is relative to
    them.

    Raises ValueError for `truncated` with another loss than `ppo_clip` and no `old_logprobs`: the
    other losses use rho_t already.
    """
    start = logprobs if old_logprobs is None else old_logprobs
    seen = correction_ratio(start.detach(), behaviour_logprobs, sequences, correction)
    kept = taken(seen, correction, correction_cap) & (weights != 0)

    def of_kept(values: torch.Tensor) -> torch.Tensor:
        # Selected before anything is computed: the gradient of zero times infinity is NaN.
        return torch.where(kept, values, torch.zeros_like(values))

    logprobs, advantages = of_kept(logprobs), of_kept(advantages)
    anchor = of_kept(behaviour_logprobs if old_logprobs is None else old_logprobs)
    if old_logprobs is None and loss == "ppo_clip":
        # A correction's weights are constants; PPO's own clip has the gradient of its ratio.
        ratio = importance_ratio(logprobs, anchor) if correction == "none" else seen
        total = policy_loss(
            logprobs,
            ratio,
            advantages,
            clip_low=clip_low,
            clip_high=clip_high,
            correction=correction,
            correction_cap=correction_cap,
        )
    elif old_logprobs is None and correction == "truncated":
        raise ValueError(f"{loss} weighs tokens by pi/mu itself; `truncated` would do it again")
    else:
        total = _objective(loss, logprobs, anchor, advantages, sequences, kept, clip_low, clip_high)
    if old_logprobs is not None and correction != "none":
        weigh = truncated_weights if correction == "truncated" else masked_weights
        total = weigh(seen, correction_cap) * total
    if reference_logprobs is not None and kl_coefficient > 0:
        total = total + kl_coefficient * k3_kl(logprobs, of_kept(reference_logprobs))
    if entropy is not None and entropy_coefficient > 0:
        total = total - entropy_coefficient * of_kept(entropy)
    return (of_kept(total) * weights).sum()


def taken(seen: torch.Tensor, correction: Correction, cap: float) -> torch.Tensor:
    """Mask of the tokens that a correction keeps, bool [T]; `seen`: their `correction_ratio`."""
    if correction in ("masked", "sequence_masked"):
        return within(seen, cap)
    return torch.ones_like(seen, dtype=torch.bool)


def _objective(
    loss: Loss,
    logprobs: torch.Tensor,
    anchor: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor | None,
    kept: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The policy loss per token [T], relative to the policy whose log-probs are `anchor`."""
    if loss == "dppo_mask":
        return divergence_masked_loss(logprobs, anchor, advantages, clip_low, clip_high)
    if loss == "gspo":
        ratio = sequence_level_ratio(logprobs, anchor, _given(sequences, loss), kept)
    else:
        ratio = importance_ratio(logprobs, anchor)
    if loss == "cispo":
        return cispo_loss(logprobs, ratio, advantages, clip_high)
    return clipped_loss(ratio, advantages, clip_low, clip_high)


def _given(sequences: torch.Tensor | None, what: str) -> torch.Tensor:
    if sequences is None:
        raise ValueError(f"{what} needs to know which tokens are of one sequence")
    return sequences
