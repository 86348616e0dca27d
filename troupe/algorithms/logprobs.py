"""Log-probabilities of chosen tokens and entropies, without a copy of the vocabulary axis.

`log_softmax(logits)` would keep one [N, V] array in float32 and its gradient another; here
only the logits themselves are kept, and the rest is made row block by row block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over each token's sequence, [T]; differentiable.

    `sequences`: int64 [T], the sequence id of each token; tokens of a sequence are adjacent.
    """
    segments = _segments(sequences)
    # T bounds the number of sequences; the exact number would need a device synchronization.
    sums = torch.zeros_like(values).index_add(0, segments, values)
    return sums.index_select(0, segments)


def sequence_means(
    values: torch.Tensor, sequences: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean of `values` over each token's sequence, [T]; differentiable.

    `kept`: bool [T], the tokens that count; None: all. The mean over no tokens is zero.
    """
    if kept is None:
        counted = torch.ones_like(values, requires_grad=False)
    else:
        counted = kept.to(values.dtype)
        values = torch.where(kept, values, torch.zeros_like(values))
    return sequence_sums(values, sequences) / sequence_sums(counted, sequences).clamp(min=1.0)


def _segments(sequences: torch.Tensor) -> torch.Tensor:
    """Return the sequence ids renumbered from zero in order of appearance, int64 [T]."""
    fresh = torch.ones_like(sequences)
    fresh[1:] = (sequences[1:] != sequences[:-1]).to(sequences.dtype)
    return fresh.cumsum(0) - 1


# Elements of one row block: 16 MiB of float32, small compared with any model's activations.
_BLOCK_ELEMENTS = 4 << 20


def selective_log_softmax(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target and entropy of each row, both differentiable, in
    nats.

    `logits`: [N, V] of any floating-point type; `targets`: int64 [N]. Returns
    (log pi(target_i), H(pi_i)), both [N], float32 (float64 for float64 logits).
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        shapes = f"{list(logits.shape)} and {list(targets.shape)}"
        raise ValueError(f"logits and targets must be [N, V] and [N], got {shapes}")
    logprobs, entropy = _SelectiveLogSoftmax.apply(logits, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for block in _blocks(logits):
            logp = torch.log_softmax(logits[block], dim=-1, dtype=dtype)
            logprobs[block] = logp.gather(-1, targets[block, None]).squeeze(-1)
            # A masked token (-inf) has probability zero and no share in the entropy.
            entropy[block] = logp.exp().mul_(logp).nan_to_num_(nan=0.0).sum(-1).neg_()
        ctx.save_for_backward(logits, targets, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        logits, targets, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for block in _blocks(logits):
            # d log pi(a) / dx_j = [j = a] - p_j;   dH / dx_j = -p_j (log p_j + H)
            logp = torch.log_softmax(logits[block], dim=-1, dtype=entropy.dtype)
            p = logp.exp()
            out = torch.zeros_like(p)
            if grad_logprobs is not None:
                g = grad_logprobs[block, None]
                torch.mul(p, -g, out=out)
                out.scatter_add_(-1, targets[block, None], g)
            if grad_entropy is not None:
                h = (logp + entropy[block, None]).mul_(p).nan_to_num_(nan=0.0)
                out.addcmul_(h, grad_entropy[block, None], value=-1.0)
            grad[block] = out
        return grad, None


def _blocks(logits: torch.Tensor) -> list[slice]:
    rows, vocabulary = logits.shape
    size = max(1, _BLOCK_ELEMENTS // max(vocabulary, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
