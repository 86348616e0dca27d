"""Samples one token per row of logits, each row by its own parameters and its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.requests import Draw

# splitmix64 (Steele, Lea, Flood 2014): a counter-based generator, so that a draw depends on
# (seed, position) alone and not on which other rows share the batch.
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_UINT64: Final = (1 << 64) - 1


def draw(logits: torch.Tensor, rows: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Sampled tokens and their log-probs for `logits` [len(rows), vocabulary].

    Log-probabilities are under softmax(logits / temperature), before top-k and top-p, as SGLang
    reports them, or after these (`Draw.processed`), as vLLM does; greedy rows (temperature 0) count
    as temperature 1, and as not truncated.
    """
    scaled = logits.float()
    temperatures, top_ks, top_ps, seeds, positions, _ = zip(*rows, strict=True)
    if set(temperatures) != {1.0}:
        positive = [temperature if temperature > 0 else 1.0 for temperature in temperatures]
        divisors = torch.tensor(positive, dtype=torch.float32, device=logits.device)
        scaled = scaled / divisors.unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # The sum runs over the whole vocabulary: float32 would lose its small terms.
    weights = logprobs.double().exp_()
    if max(top_ks) > 0 or min(top_ps) < 1.0:
        truncated = [i for i, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1.0]
        weights[truncated] = _truncate(weights[truncated], [rows[i] for i in truncated])
    cdf = weights.cumsum(dim=-1)
    targets = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
    targets = targets.unsqueeze(1) * cdf[:, -1:]
    # The first token whose cumulative weight exceeds the target: never one of weight zero.
    tokens = torch.searchsorted(cdf, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if min(temperatures) <= 0:
        greedy = [i for i, temperature in enumerate(temperatures) if temperature <= 0]
        tokens[greedy] = logits[greedy].argmax(dim=-1, keepdim=True)
    chosen = logprobs.gather(1, tokens)
    if renormalised := [i for i, row in enumerate(rows) if row.processed and row.temperature > 0]:
        # What is left sums to one again; without truncation it did already, but for rounding.
        cut = [i for i in renormalised if rows[i].top_k > 0 or rows[i].top_p < 1.0]
        chosen[cut] -= cdf[cut, -1:].log().to(chosen.dtype)
    return tokens.squeeze(1).tolist(), chosen.squeeze(1).tolist()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One float64 in [0, 1) per row, a function of its seed and position only."""
    state = np.array([seed & _UINT64 for seed in seeds], dtype=np.uint64)
    # The seed is mixed first, so that sequences of neighbouring seeds do not overlap.
    state = _mix(state + _GAMMA)
    state = _mix(state + _GAMMA * (np.array(positions, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))


def _truncate(weights: torch.Tensor, rows: Sequence[Draw]) -> torch.Tensor:
    """`weights` with everything outside each row's top-k and nucleus set to zero."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    size, device = weights.shape[-1], weights.device
    rank = torch.arange(size, device=device)
    top_k = torch.tensor([r.top_k if r.top_k > 0 else size for r in rows], device=device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), 0.0)
    # Nucleus of the tokens that top-k left: a token stays while the mass before it is below top_p.
    before = ordered.cumsum(dim=-1) - ordered
    top_p = torch.tensor([r.top_p for r in rows], dtype=torch.float64, device=device)
    ordered = ordered.masked_fill(before >= (top_p * ordered.sum(dim=-1)).unsqueeze(1), 0.0)
    return torch.zeros_like(weights).scatter_(1, order, ordered)
