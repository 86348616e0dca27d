"""Token metrics of a step, added up over micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from troupe.algorithms.corrections import (
    Correction,
    masked_weights,
    truncated_weights,
    within,
)
from troupe.algorithms.losses import correction_ratio, k3_kl, taken
from troupe.algorithms.objectives import Loss, importance_ratio, removed_by


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
    corrected: Correction = "none"
    correction_weight: torch.Tensor | float = 0.0
    # Tokens whose ratio the correction cut down or masked.
    corrected_tokens: torch.Tensor | float = 0.0

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
        loss: Loss = "ppo_clip",
        sequences: torch.Tensor | None = None,
        correction: Correction = "none",
        correction_cap: float = 2.0,
        old_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> None:
        """Add T tokens; `loss_sum` is a scalar, the rest are [T], as passed to `grpo_loss_sum`."""
        if logprobs.numel() == 0:
            return
        ratio = importance_ratio(logprobs, behaviour_logprobs)
        self.tokens += logprobs.numel()
        self.loss = self.loss + loss_sum.detach()
        self.ratio = self.ratio + ratio.sum(dtype=torch.float64)
        self.ratio_squares = self.ratio_squares + ratio.to(torch.float64).square().sum()
        self.ratio_min = torch.minimum(torch.as_tensor(self.ratio_min), ratio.min())
        self.ratio_max = torch.maximum(torch.as_tensor(self.ratio_max), ratio.max())
        masked = torch.zeros_like(ratio, dtype=torch.bool)
        recomputed = old_logprobs is not None
        anchor = behaviour_logprobs if old_logprobs is None else old_logprobs
        start = logprobs if old_logprobs is None else old_logprobs
        seen = correction_ratio(start, behaviour_logprobs, sequences, correction)
        # A correction replaces PPO's clip, unless the clip is relative to recomputed log-probs.
        if correction == "none" or loss != "ppo_clip" or recomputed:
            of_loss = (logprobs, anchor, advantages, sequences, clip_low, clip_high)
            kept = taken(seen, correction, correction_cap)
            removed = removed_by(loss, *of_loss, kept)
            self.clipped = self.clipped + removed.sum()
            if loss == "dppo_mask":
                masked = removed
        if correction != "none":
            weighs = loss == "ppo_clip" or recomputed
            cut = self._add_correction(seen, correction, correction_cap, weighs=weighs)
            if correction != "truncated":
                masked = masked | cut
        self.masked = self.masked + masked.sum()
        # The mismatch between the policy that generated the tokens and the trainer's copy of it.
        mismatch = k3_kl(behaviour_logprobs, logprobs)
        self.mismatch_kl = self.mismatch_kl + mismatch.sum(dtype=torch.float64)
        self.entropy = self.entropy + entropy.sum(dtype=torch.float64)
        if reference_logprobs is not None:
            self.has_reference = True
            kl = k3_kl(logprobs, reference_logprobs)
            self.reference_kl = self.reference_kl + kl.sum(dtype=torch.float64)

    def _add_correction(
        self, seen: torch.Tensor, correction: Correction, cap: float, *, weighs: bool
    ) -> torch.Tensor:
        """Add the correction's weights; returns which tokens it cut down or masked, bool [T]."""
        self.corrected = correction
        if correction == "truncated":
            weights, cut = truncated_weights(seen, cap), seen > cap
        elif weighs:
            weights, cut = masked_weights(seen, cap), ~within(seen, cap)
        else:
            cut = ~within(seen, cap)
            weights = (~cut).to(seen.dtype)
        self.correction_weight = self.correction_weight + weights.sum(dtype=torch.float64)
        self.corrected_tokens = self.corrected_tokens + cut.sum()
        return cut

    def metrics(self) -> dict[str, float]:
        """The metrics: means over all tokens added."""
        n = max(self.tokens, 1)
        squares = float(self.ratio_squares)
        metrics = {
            "importance_sampling_ratio/min": float(self.ratio_min) if self.tokens else 0.0,
            "importance_sampling_ratio/mean": float(self.ratio) / n,
            "importance_sampling_ratio/max": float(self.ratio_max),
            # (sum rho)^2 / (n sum rho^2): effective sample size as a fraction of the tokens.
            "effective_sample_size": float(self.ratio) ** 2 / (n * squares) if squares else 0.0,
            "clip_fraction": float(self.clipped) / n,
            "masked_fraction": float(self.masked) / n,
            "k3_kl": float(self.mismatch_kl) / n,
            "entropy": float(self.entropy) / n,
        }
        if self.has_reference:
            metrics["kl"] = float(self.reference_kl) / n
        if self.corrected != "none":
            metrics["correction/weight_mean"] = float(self.correction_weight) / n
            metrics[f"correction/{self.corrected}_fraction"] = float(self.corrected_tokens) / n
        return metrics
