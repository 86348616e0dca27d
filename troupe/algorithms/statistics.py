"""Token metrics of a step, added up over micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from troupe.algorithms.corrections import CORRECTIONS, CorrectionFunction, truncated
from troupe.algorithms.expert_load import ExpertLoad, load_metrics
from troupe.algorithms.losses import k3_kl, kept_by
from troupe.algorithms.objectives import (
    LOSSES,
    LossFunction,
    Tokens,
    importance_ratio,
    ppo_clip,
    removed_by,
    traits_of,
)
from troupe.contracts import metric_names


@dataclass
class TokenStatistics:
    """Accumulator of token metrics: `add` each micro-batch, then read `metrics`.

    Sums stay tensors until they are read, so that adding never waits for a device.
    """

    tokens: int = 0
    loss: torch.Tensor | float = 0.0
    ratio: torch.Tensor | float = 0.0
    ratio_squares: torch.Tensor | float = 0.0
    ratio_min: torch.Tensor | float = math.inf
    ratio_max: torch.Tensor | float = 0.0
    # Tokens that the loss clips or masks.
    clipped: torch.Tensor | float = 0.0
    # Tokens without a policy gradient because the loss or the correction masks them.
    masked: torch.Tensor | float = 0.0
    mismatch_kl: torch.Tensor | float = 0.0
    reference_kl: torch.Tensor | float = 0.0
    entropy: torch.Tensor | float = 0.0
    has_reference: bool = False
    # Tokens whose divergence from a teacher is known, and the sum of the divergence.
    taught: int = 0
    # Demonstrated tokens, and the sum of their negative log-probs.
    demonstrated: int = 0
    demonstrated_nll: torch.Tensor | float = 0.0
    teacher_kl: torch.Tensor | float = 0.0
    # The correction's name; `own` for a user's.
    corrected: str = "none"
    correction_weight: torch.Tensor | float = 0.0
    # Tokens whose ratio the correction cut down or masked.
    corrected_tokens: torch.Tensor | float = 0.0
    # For a mixture of experts: tokens by layer and expert; the sum of imbalances weighted by the
    # tokens' weights in the loss, and the sum of the weights; tokens whose experts were replayed,
    # and all tokens.
    expert_tokens: torch.Tensor | None = None
    imbalance: torch.Tensor | float = 0.0
    imbalance_weight: torch.Tensor | float = 0.0
    replayed: torch.Tensor | float = 0.0
    routed: int = 0

    @torch.no_grad()
    def add(
        self,
        loss_sum: torch.Tensor,
        logprobs: torch.Tensor,
        behaviour_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        entropy: torch.Tensor,
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
        teacher_divergence: torch.Tensor | None = None,
        demonstrated: torch.Tensor | None = None,
        load: ExpertLoad | None = None,
    ) -> None:
        """Add T tokens; `loss_sum` is a scalar, the rest are [T], as passed to `grpo_loss_sum`.
        `load`: the load of the experts to which they were sent."""
        if load is not None:
            self._add_load(load)
        if demonstrated is not None:
            # For these tokens only the loss has a meaning.
            self.demonstrated += int(demonstrated.sum())
            nll = -logprobs[demonstrated].sum(dtype=torch.float64)
            self.demonstrated_nll = self.demonstrated_nll + nll
            others = ~demonstrated
            logprobs, behaviour_logprobs, advantages, entropy = (
                one[others] for one in (logprobs, behaviour_logprobs, advantages, entropy)
            )
            sequences, old_logprobs, reference_logprobs, teacher_divergence = (
                None if one is None else one[others]
                for one in (sequences, old_logprobs, reference_logprobs, teacher_divergence)
            )
        if logprobs.numel() == 0:
            return
        ratio = importance_ratio(logprobs, behaviour_logprobs)
        self.tokens += logprobs.numel()
        self.loss = self.loss + loss_sum.detach()
        self.ratio = self.ratio + ratio.sum(dtype=torch.float64)
        self.ratio_squares = self.ratio_squares + ratio.to(torch.float64).square().sum()
        self.ratio_min = torch.minimum(torch.as_tensor(self.ratio_min), ratio.min())
        self.ratio_max = torch.maximum(torch.as_tensor(self.ratio_max), ratio.max())
        loss = LOSSES[loss] if isinstance(loss, str) else loss
        correction = CORRECTIONS[correction] if isinstance(correction, str) else correction
        masked = torch.zeros_like(ratio, dtype=torch.bool)
        recomputed = old_logprobs is not None
        start = logprobs if old_logprobs is None else old_logprobs
        anchor = behaviour_logprobs if old_logprobs is None else old_logprobs
        given = Tokens(
            start,
            behaviour_logprobs,
            anchor,
            advantages,
            sequences,
            clip_low=clip_low,
            clip_high=clip_high,
            correction_cap=correction_cap,
            dual_clip=dual_clip,
        )
        factors = None if correction is None else correction(given)
        # A correction replaces PPO's clip, unless the clip is relative to recomputed log-probs.
        traits = traits_of(loss)
        if factors is None or not traits.yields or recomputed:
            kept = kept_by(correction, factors, ratio)
            removed = removed_by(loss, replace(given, logprobs=logprobs, kept=kept))
            self.clipped = self.clipped + removed.sum()
            if traits.masks:
                masked = removed
        if factors is not None:
            own = correction not in CORRECTIONS.values()
            name = "own" if own else getattr(correction, "__name__", "")
            # The weights that count. With a loss that itself has the weight pi/mu, only the zeros
            # of the built-in masks do.
            weighs = own or traits.yields or recomputed
            cut = factors == 0
            if correction is truncated:
                cut = importance_ratio(start, behaviour_logprobs) > correction_cap
            else:
                masked = masked | cut
            weights = factors if weighs else (~cut).to(factors.dtype)
            self.corrected = name
            self.correction_weight = self.correction_weight + weights.sum(dtype=torch.float64)
            self.corrected_tokens = self.corrected_tokens + cut.sum()
        self.masked = self.masked + masked.sum()
        # The mismatch between the policy that generated the tokens and the trainer's copy of it.
        mismatch = k3_kl(behaviour_logprobs, logprobs)
        self.mismatch_kl = self.mismatch_kl + mismatch.sum(dtype=torch.float64)
        self.entropy = self.entropy + entropy.sum(dtype=torch.float64)
        if reference_logprobs is not None:
            self.has_reference = True
            kl = k3_kl(logprobs, reference_logprobs)
            self.reference_kl = self.reference_kl + kl.sum(dtype=torch.float64)
        if teacher_divergence is not None:
            self.add_divergence(teacher_divergence)

    def _add_load(self, load: ExpertLoad) -> None:
        known = self.expert_tokens
        self.expert_tokens = load.counts if known is None else known + load.counts
        if load.balance is not None:
            self.imbalance = self.imbalance + load.balance.detach().double()
            self.imbalance_weight = self.imbalance_weight + load.weight
        self.replayed = self.replayed + load.replayed
        self.routed += load.tokens

    def add_divergence(self, divergence: torch.Tensor) -> None:
        """Add the divergence from a teacher at T tokens, or estimates of it, [T]."""
        self.taught += divergence.numel()
        self.teacher_kl = self.teacher_kl + divergence.sum(dtype=torch.float64)

    def _routing_metrics(self) -> dict[str, float]:
        found = {} if self.expert_tokens is None else load_metrics(self.expert_tokens)
        if weight := float(self.imbalance_weight):
            found["router/aux_loss"] = float(self.imbalance) / weight
        if replayed := float(self.replayed):
            found["router/replayed_fraction"] = replayed / max(self.routed, 1)
        return found

    def metrics(self) -> dict[str, float]:
        """Return the metrics: means over all tokens added."""
        supervised = self._routing_metrics()
        if self.demonstrated:
            supervised["supervised/loss"] = float(self.demonstrated_nll) / self.demonstrated
            if not self.tokens:
                return supervised
        n = max(self.tokens, 1)
        squares = float(self.ratio_squares)
        metrics = supervised | {
            "importance_sampling_ratio/min": float(self.ratio_min) if self.tokens else 0.0,
            "importance_sampling_ratio/mean": float(self.ratio) / n,
            metric_names.RATIO_MAX: float(self.ratio_max),
            # (sum rho)^2 / (n sum rho^2): effective sample size as a fraction of the tokens.
            "effective_sample_size": float(self.ratio) ** 2 / (n * squares) if squares else 0.0,
            "clip_fraction": float(self.clipped) / n,
            "masked_fraction": float(self.masked) / n,
            metric_names.MISMATCH_KL: float(self.mismatch_kl) / n,
            metric_names.ENTROPY: float(self.entropy) / n,
        }
        if self.has_reference:
            metrics[metric_names.KL] = float(self.reference_kl) / n
        if self.taught:
            metrics["distillation/kl"] = float(self.teacher_kl) / self.taught
        if self.corrected != "none":
            metrics["correction/weight_mean"] = float(self.correction_weight) / n
            metrics[f"correction/{self.corrected}_fraction"] = float(self.corrected_tokens) / n
        return metrics
