"""Log-probs, entropies and their slopes by one pass each over logits on a GPU, in Triton.

With torch's own functions the logits of a large vocabulary go through memory a dozen times, in
float32: a quarter of an update of a 0.5B-class model. Here they stay in the type that the product
gave, and are read twice and written once (as Liger Kernel, Hsu et al. 2024, does).
"""

from __future__ import annotations

import functools
import logging
from typing import Final

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

log = logging.getLogger(__name__)

# Elements of a row that a program holds at a time.
_BLOCK: Final = 8192
_WARPS: Final = 16
_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether logits of this type, there, can be given to the functions of this module."""
    return device.type == "cuda" and dtype in _TYPES and triton is not None and _works(device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether kernels can be compiled here, and find what plain torch does."""
    logits = torch.linspace(-3.0, 3.0, 300, device=device).sin().reshape(3, 100).contiguous()
    logp = torch.log_softmax(logits, -1)
    targets = torch.tensor([0, 50, 99], device=device)
    logprobs, entropy, mass = (logits.new_empty(3) for _ in range(3))
    try:
        score_rows(logits, targets, logits.new_ones(3), logprobs, entropy, mass)
    except Exception as error:  # of a compiler, of any kind
        log.warning("no Triton kernels on %s, losses take longer there: %s", device, error)
        return False
    plain = logp.gather(-1, targets[:, None])[:, 0], -(logp * logp.exp()).sum(-1)
    same = all(
        torch.allclose(f, p, atol=1e-4) for f, p in zip((logprobs, entropy), plain, strict=True)
    )
    if not same:
        log.warning("Triton's kernels are wrong on %s and are not used", device)
    return same


def score_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    heat: torch.Tensor,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    mass: torch.Tensor,
) -> None:
    """Fill in, for logits [n, V] (contiguous) over temperatures `heat` [n], the log-probs of
    `targets` (int64 [n]), the entropies in nats, and `mass`, the log of the sum of exponentials:
    float32 [n]. A masked token (-inf) has no share in the entropy."""
    vocabulary = logits.shape[1]
    _score[(len(logits),)](
        logits,
        targets,
        heat,
        logprobs,
        entropy,
        mass,
        vocabulary,
        BLOCK=_block(vocabulary),
        num_warps=_WARPS,
    )


def slope_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    heat: torch.Tensor,
    entropy: torch.Tensor,
    mass: torch.Tensor,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor,
) -> None:
    """Overwrite `logits` with the slope of a loss by them, given its slopes by the log-probs of
    `targets` and by the entropies, float32 [n]; the rest as `score_rows` was given and left it."""
    vocabulary = logits.shape[1]
    shared = (targets, heat, entropy, mass, by_logprob, by_entropy)
    _slope[(len(logits),)](logits, *shared, vocabulary, BLOCK=_block(vocabulary), num_warps=_WARPS)


def _block(vocabulary: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(vocabulary)))


if triton is not None:
    # (Triton reads annotations, and knows none of Python's.)
    @triton.jit  # type: ignore[untyped-decorator]
    def _score(  # type: ignore[no-untyped-def]
        logits,
        targets,
        heat,
        logprobs,
        entropy,
        mass,
        vocabulary,
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * vocabulary
        temperature = tl.load(heat + row)
        top = float("-inf")  # the largest so far, m
        total = 0.0  # sum of e^(x - m)
        spread = 0.0  # sum of (x - m) e^(x - m)
        for at in range(0, vocabulary, BLOCK):
            place = at + tl.arange(0, BLOCK)
            inside = place < vocabulary
            x = tl.load(start + place, mask=inside, other=float("-inf")).to(tl.float32)
            x = x / temperature
            higher = tl.maximum(top, tl.max(x, 0))
            shift = tl.where(total > 0, top - higher, 0.0)
            spread = tl.exp(shift) * (spread + shift * total)
            total = total * tl.exp(shift)
            # (Of a block in which all tokens are masked the largest is -inf, too.)
            away = tl.where(x == float("-inf"), x, x - higher)
            weight = tl.exp(away)
            total += tl.sum(weight, 0)
            spread += tl.sum(tl.where(weight == 0, 0.0, weight * away), 0)
            top = higher
        whole = top + tl.log(total)
        chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) / temperature
        tl.store(mass + row, whole)
        tl.store(logprobs + row, chosen - whole)
        tl.store(entropy + row, tl.log(total) - spread / total)

    @triton.jit  # type: ignore[untyped-decorator]
    def _slope(  # type: ignore[no-untyped-def]
        logits,
        targets,
        heat,
        entropy,
        mass,
        by_logprob,
        by_entropy,
        vocabulary,
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * vocabulary
        temperature = tl.load(heat + row)
        target = tl.load(targets + row)
        whole = tl.load(mass + row)
        own = tl.load(entropy + row)
        direct = tl.load(by_logprob + row)
        bonus = tl.load(by_entropy + row)
        for at in range(0, vocabulary, BLOCK):
            place = at + tl.arange(0, BLOCK)
            inside = place < vocabulary
            x = tl.load(start + place, mask=inside, other=float("-inf")).to(tl.float32)
            logp = x / temperature - whole
            p = tl.exp(logp)
            # d log pi(a) / dx_j = [j = a] - p_j;   dH / dx_j = -p_j (log p_j + H)
            slope = direct * (tl.where(place == target, 1.0, 0.0) - p)
            slope -= bonus * tl.where(p == 0, 0.0, p * (logp + own))
            slope = slope / temperature
            tl.store(start + place, slope.to(logits.dtype.element_ty), mask=inside)
