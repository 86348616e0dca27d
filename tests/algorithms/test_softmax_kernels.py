"""The Triton kernels, on a GPU."""

from __future__ import annotations

import pytest
import torch

from troupe.algorithms.linear_loss import Head, linear_loss, score_rows, slope_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check(device: str, dtype: torch.dtype, vocabulary: int, *, masked: bool) -> None:
    """Scores and slopes against autograd in float64, on what `dtype` holds of the logits."""
    random = torch.Generator().manual_seed(vocabulary)
    rows = 5
    logits = (8 * torch.randn((rows, vocabulary), generator=random)).to(dtype)
    if masked:
        logits[:, : vocabulary // 2] = float("-inf")
    targets = torch.randint(vocabulary // 2, vocabulary, (rows,), generator=random)
    heat = 0.5 + torch.rand((rows, 1), generator=random)
    by_logprob, by_entropy = (torch.randn(rows, generator=random) for _ in range(2))

    exact = logits.double().requires_grad_()
    logp = torch.log_softmax(exact / heat.double(), -1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    (chosen @ by_logprob.double() + entropy @ by_entropy.double()).backward()

    ours = logits.to(device, copy=True)
    found = [torch.full((rows,), float("nan"), device=device) for _ in range(3)]
    there = targets.to(device), heat.to(device)
    score_rows(ours, *there, *found)
    torch.testing.assert_close(found[0].cpu().double(), chosen.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found[1].cpu().double(), entropy.detach(), rtol=1e-5, atol=2e-5)
    slopes = by_logprob.to(device), by_entropy.to(device)
    slope_rows(ours, *there, found[1], found[2], *slopes)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 5e-4}[dtype]
    assert exact.grad is not None
    torch.testing.assert_close(ours.cpu().double(), exact.grad, rtol=rounding, atol=2e-5)


CASES = [
    (dtype, vocabulary, masked)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for vocabulary in (37, 8192, 20_001)
    for masked in (False, True)
]


@needs_gpu
@pytest.mark.parametrize(("dtype", "vocabulary", "masked"), CASES)
def test_kernels_compute_scores_and_slopes(
    dtype: torch.dtype, vocabulary: int, masked: bool
) -> None:
    check("cuda", dtype, vocabulary, masked=masked)


@needs_gpu
@pytest.mark.parametrize("half", [False, True])
def test_the_loss_on_a_gpu_is_that_of_plain_torch(half: bool) -> None:
    """In several blocks, with runs longer than one; against float64 on the CPU."""
    random = torch.Generator().manual_seed(1)
    count, vocabulary, width = 50, 1031, 24
    hidden = torch.randn((count, width), generator=random)
    weight = torch.randn((vocabulary, width), generator=random)
    targets = torch.randint(vocabulary, (count,), generator=random)
    heat = 0.5 + torch.rand((count, 1), generator=random)

    def gradients(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (hidden, weight)]
        with torch.autocast("cuda", torch.bfloat16, enabled=half and device == "cuda"):
            loss, scores = linear_loss(
                leaves[0],
                Head(leaves[1]),
                targets.to(device),
                heat.to(device, dtype),
                lambda logprobs, entropy, part: (logprobs.exp() - 0.1 * entropy).sum(),
                spans=[30, 5, 15],
                block=16,
            )
        loss.backward()
        found = [*(leaf.grad for leaf in leaves), scores.logprobs, scores.entropy]
        return [t.cpu().double() for t in found if t is not None]

    expected = gradients("cpu", torch.float64)
    for ours, exact in zip(gradients("cuda", torch.float32), expected, strict=True):
        error = float((ours - exact).norm() / exact.norm())
        # (Plain torch under autocast is off by 4.6e-2.)
        assert error < (6e-2 if half else 1e-4)
