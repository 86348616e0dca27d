"""What a step reports about its tokens, added up over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from troupe.algorithms.corrections import (
    Correction,
    masked_weights,
    truncated_weights,
    within,
)
from troupe.algorithms.losses import importance_ratio, is_clipped, k3_kl


@dataclass
class TokenStatistics:
    """Sums over tokens; `add` one micro-batch after another, then read the means.

    Sums stay tensors until they are read, so that adding never waits for a device.
    """

    tokens: int = 0
    loss: torch.Tensor | float = 0.0
    ratio: torch.Tensor | float = 0.0
    ratio_max: torch.Tensor | float = 0.0
    clipped: torch.Tensor | float = 0.0
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
        correction: Correction = "none",
        correction_cap: float = 2.0,
        reference_logprobs: torch.Tensor | None = None,
    ) -> None:
        """Add T tokens; `loss_sum` is a scalar, the rest [T]."""
        if logprobs.numel() == 0:
            return
        ratio = importance_ratio(logprobs, behaviour_logprobs)
        self.tokens += logprobs.numel()
        self.loss = self.loss + loss_sum.detach()
        self.ratio = self.ratio + ratio.sum(dtype=torch.float64)
        self.ratio_max = torch.maximum(torch.as_tensor(self.ratio_max), ratio.max())
        if correction == "none":
            self.clipped = self.clipped + is_clipped(ratio, advantages, clip_low, clip_high).sum()
        else:
            self._add_correction(ratio, correction, correction_cap)
        # Between the policy that generated the tokens and the trainer's copy of it.
        mismatch = k3_kl(behaviour_logprobs, logprobs)
        self.mismatch_kl = self.mismatch_kl + mismatch.sum(dtype=torch.float64)
        self.entropy = self.entropy + entropy.sum(dtype=torch.float64)
        if reference_logprobs is not None:
            self.has_reference = True
            kl = k3_kl(logprobs, reference_logprobs)
            self.reference_kl = self.reference_kl + kl.sum(dtype=torch.float64)

    def _add_correction(self, ratio: torch.Tensor, correction: Correction, cap: float) -> None:
        self.corrected = correction
        if correction == "truncated":
            weights, cut = truncated_weights(ratio, cap), ratio > cap
        else:
            weights, cut = masked_weights(ratio, cap), ~within(ratio, cap)
        self.correction_weight = self.correction_weight + weights.sum(dtype=torch.float64)
        self.corrected_tokens = self.corrected_tokens + cut.sum()

    def metrics(self) -> dict[str, float]:
        """Means over all tokens added, by the names that the field uses."""
        n = max(self.tokens, 1)
        metrics = {
            "importance_ratio/mean": float(self.ratio) / n,
            "importance_ratio/max": float(self.ratio_max),
            "clip_fraction": float(self.clipped) / n,
            "mismatch_kl": float(self.mismatch_kl) / n,
            "entropy": float(self.entropy) / n,
        }
        if self.has_reference:
            metrics["kl"] = float(self.reference_kl) / n
        if self.corrected != "none":
            metrics["correction/weight_mean"] = float(self.correction_weight) / n
            metrics[f"correction/{self.corrected}_fraction"] = float(self.corrected_tokens) / n
        return metrics
