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
from dataclasses import dataclass, replace
from typing import Literal

import torch

from troupe.algorithms.corrections import (
    CORRECTIONS,
    CorrectionFunction,
    corrected_loss,
    truncated,
)
from troupe.algorithms.objectives import (
    LOSSES,
    MAX_LOG_RATIO,
    LossFunction,
    Tokens,
    bounded_exp,
    ppo_clip,
    traits_of,
    where_weighed,
)

Normalize = Literal["token", "sequence", "constant"]


def token_weights(lengths: Sequence[int], normalize: Normalize) -> torch.Tensor:
    """Return the token weights w_t of sequences with these response lengths; float64
    [sum(lengths)].

    "token", "constant": 1; "sequence": 1/length, so that all sequences have equal weight.
    """
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    if normalize != "sequence":
        return torch.ones(int(sizes.sum()), dtype=torch.float64)
    return torch.repeat_interleave(1.0 / sizes.clamp(min=1).to(torch.float64), sizes)


def normalizer(lengths: Sequence[int], normalize: Normalize, constant: int = 1) -> int:
    """Return the contribution of these sequences to the loss normalizer N.

    "token": their number of tokens; "sequence": the number of sequences with at least one token;
    "constant": `constant` per such sequence (Dr. GRPO, Liu et al. 2025, section 3.2).
    """
    if normalize == "token":
        return sum(lengths)
    present = sum(1 for length in lengths if length > 0)
    return present * constant if normalize == "constant" else present


def k3_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the estimate of KL(pi || ref) at each token [T]: q - log q - 1 with q =
    ref(a_t)/pi(a_t).

    Never negative, unbiased over a_t ~ pi (Schulman's k3). q is bounded by `bounded_exp`.
    """
    log_q = reference_logprobs - logprobs
    return bounded_exp(log_q) - log_q.clamp(max=MAX_LOG_RATIO) - 1.0


def grpo_loss_sum(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    loss: str | LossFunction = ppo_clip,
    sequences: torch.Tensor | None = None,
    correction: str | CorrectionFunction | None = None,
    correction_cap: float = 2.0,
    dual_clip: float | None = None,
    old_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy: torch.Tensor | None = None,
    entropy_coefficient: float = 0.0,
    demonstrated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the summed loss sum_t w_t (policy_t + beta KL_t - c H_t), a scalar; the caller divides
    by N.

    All arguments are [T]; gradients flow through `logprobs` and `entropy`. `loss`, `correction`:
    functions, or names of built-in ones. `sequences` (int64, see `sequence_sums`) is the sequence
    id of each token; `gspo`, `sequence_masked` and users' functions need it, with whole sequences.

    A masked token has no KL and no entropy term either, does not count in its sequence's ratio
    under `gspo`, and has a gradient of exactly zero even if its log-probs are not finite. N counts
    it nevertheless, so that N does not depend on the weights. `truncated` scales the policy term
    only. `old_logprobs`: under the weights at the beginning of the step, if the loss is relative to
    them. `demonstrated`: bool, tokens that were given, not generated: their loss is -A_t log
    pi(a_t), and nothing else; A_t is one, or comes from `preference_weights`.

    Raises ValueError for `truncated` with another loss than `ppo_clip` and no `old_logprobs`: the
    other losses use rho_t already.
    """
    loss = LOSSES[loss] if isinstance(loss, str) else loss
    correction = CORRECTIONS[correction] if isinstance(correction, str) else correction
    recomputed = old_logprobs is not None
    given = Tokens(
        (logprobs if old_logprobs is None else old_logprobs).detach(),
        behaviour_logprobs,
        behaviour_logprobs if old_logprobs is None else old_logprobs,
        advantages,
        sequences,
        clip_low=clip_low,
        clip_high=clip_high,
        correction_cap=correction_cap,
        dual_clip=dual_clip,
    )
    factors = None if correction is None else correction(given)
    kept = kept_by(correction, factors, logprobs) & (weights != 0)
    if demonstrated is not None:
        kept = kept & ~demonstrated

    def of_kept(values: torch.Tensor) -> torch.Tensor:
        # Selected before anything is computed: the gradient of zero times infinity is NaN.
        return torch.where(kept, values, torch.zeros_like(values))

    tokens = replace(
        given,
        logprobs=of_kept(logprobs),
        behaviour_logprobs=of_kept(behaviour_logprobs),
        old_logprobs=of_kept(given.old_logprobs),
        advantages=of_kept(advantages),
        kept=kept,
    )
    if factors is not None and traits_of(loss).yields and not recomputed:
        # In place of PPO's clip. The weights are constants.
        total = corrected_loss(tokens.logprobs, tokens.advantages, factors)
    elif factors is not None and correction is truncated and not recomputed:
        raise ValueError("this loss weighs tokens by pi/mu itself; `truncated` would do it again")
    else:
        total = loss(tokens)
        # The built-in masks have the weight pi/mu, which these losses have already.
        if factors is not None and (recomputed or correction not in CORRECTIONS.values()):
            total = factors * total
    if reference_logprobs is not None and kl_coefficient > 0:
        total = total + kl_coefficient * k3_kl(tokens.logprobs, of_kept(reference_logprobs))
    if entropy is not None and entropy_coefficient > 0:
        total = total - entropy_coefficient * of_kept(entropy)
    total = of_kept(total)
    if demonstrated is not None:
        shown = -advantages * where_weighed(logprobs, advantages)
        total = torch.where(demonstrated, shown, total)
    return (total * weights).sum()


@dataclass(frozen=True)
class SideSums:
    """Sums over the replies of the two sides of p pairs, [p, 2]: rejected, then preferred; float64.

    They are all that a pair's loss depends on.
    """

    # log(pi/pi_ref), and the number of tokens.
    log_ratios: torch.Tensor
    tokens: torch.Tensor
    # bool [p]: whether the pair has all of its replies.
    whole: torch.Tensor

    @staticmethod
    def of(
        log_ratios: torch.Tensor, lengths: torch.Tensor, pairs: torch.Tensor, chosen: torch.Tensor
    ) -> SideSums:
        """Return the sums over n replies. All arguments are [n]: `log_ratios` log(pi/pi_ref) of
        each reply, `lengths` its tokens, `pairs` (int64) the number of its pair, `chosen` (bool)
        its side, which may have several replies."""
        count = int(pairs.max()) + 1 if len(pairs) else 0
        sides = 2 * pairs + chosen.long()

        def by_side(values: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(2 * count, dtype=torch.float64)
            return zeros.index_add(0, sides, values.to(torch.float64)).reshape(count, 2)

        whole = (by_side(torch.ones_like(lengths)) > 0).all(1)
        return SideSums(by_side(log_ratios), by_side(lengths), whole)


@dataclass(frozen=True)
class PreferenceWeights:
    """The terms of p pairs of n replies in the loss; float64."""

    # [n]: minus the derivative of the summed loss by a reply's log pi(y); replies that lack the
    # other side of their pair have zero.
    weights: torch.Tensor
    # [p]: of complete pairs.
    losses: torch.Tensor
    # [p]: the implicit rewards beta log(pi/pi_ref) of both sides.
    chosen: torch.Tensor
    rejected: torch.Tensor


def preference_weights(
    sums: SideSums,
    pairs: torch.Tensor,
    chosen: torch.Tensor,
    *,
    loss: Literal["dpo", "ipo"],
    beta: float,
) -> PreferenceWeights:
    """Return the losses of pairs of replies, and the weights by which they reach log pi.

    A pair's loss is a function of one number, the margin m, which a pass without gradients gives:
    its gradient then equals the gradient of sum_y -w_y log pi(y), with constants w_y, so that the
    two sides, and the policies of a joint pair, need not be in one pass. `sums`: of p pairs;
    `pairs` (int64) and `chosen` (bool), [n]: the number of each reply's pair, and its side. The
    losses are in the docstring of `PreferencesSpec.loss`.
    """
    totals, tokens, whole = sums.log_ratios, sums.tokens, sums.whole
    divisors = tokens.clamp(min=1) if loss == "ipo" else torch.ones_like(tokens)
    means = totals / divisors
    margins = means[:, 1] - means[:, 0]
    if loss == "ipo":
        gaps = margins - 1 / (2 * beta)
        losses, slopes = gaps.square(), 2 * gaps
    else:
        losses = -torch.nn.functional.logsigmoid(beta * margins)
        slopes = -beta * torch.sigmoid(-beta * margins)
    slopes = torch.where(whole, slopes, torch.zeros_like(slopes))
    signed = slopes[:, None] * torch.tensor([1.0, -1.0], dtype=torch.float64) / divisors
    rewards = beta * totals[whole]
    sides = 2 * pairs + chosen.long()
    return PreferenceWeights(signed.reshape(-1)[sides], losses[whole], rewards[:, 1], rewards[:, 0])


def kept_by(
    correction: CorrectionFunction | None, factors: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the mask of the tokens that a correction with these weights keeps, bool [T] as
    `like`."""
    if factors is None or correction is truncated:  # which only scales
        return torch.ones_like(like, dtype=torch.bool)
    return factors != 0
