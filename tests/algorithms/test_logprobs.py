"""Selective log-softmax against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms import logprobs as module
from troupe.algorithms.logprobs import selective_log_softmax


def reference(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@settings(deadline=None)
@given(
    st.integers(0, 20), st.integers(1, 30), st.integers(1, 64), st.integers(0, 99), st.booleans()
)
def test_values_and_gradients(
    rows: int, vocabulary: int, block: int, seed: int, use_entropy: bool
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, dtype=torch.float64) * 5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,))
    weight_lp, weight_h = torch.randn(2, rows, dtype=torch.float64)
    results = []
    saved = module._BLOCK_ELEMENTS
    module._BLOCK_ELEMENTS = block
    try:
        for function in (selective_log_softmax, reference):
            lp, h = function(logits, targets)
            loss = (lp * weight_lp).sum()
            if use_entropy:
                loss = loss + (h * weight_h).sum()
            (grad,) = torch.autograd.grad(loss, logits)
            results.append((lp, h, grad))
    finally:
        module._BLOCK_ELEMENTS = saved
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 6, 3])
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, targets), logits)


def test_closed_forms() -> None:
    lp, h = selective_log_softmax(torch.zeros(2, 8), torch.tensor([1, 5]))
    torch.testing.assert_close(lp, torch.full((2,), 1 / 8).log())
    torch.testing.assert_close(h, torch.full((2,), 8.0).log())
    # Large logits overflow nothing, masked tokens have no share.
    logits = torch.tensor([[1e4, -torch.inf, 1e4, -1e4]], requires_grad=True)
    lp, h = selective_log_softmax(logits, torch.tensor([2]))
    torch.testing.assert_close((lp, h), (torch.tensor([0.5]).log(), torch.tensor([2.0]).log()))
    (grad,) = torch.autograd.grad((lp + h).sum(), logits)
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.0, 0.5, 0.0]]))


def test_half_precision_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 100).to(torch.bfloat16)
    targets = torch.randint(100, (16,))
    lp, h = selective_log_softmax(logits, targets)
    assert lp.dtype == h.dtype == torch.float32
    torch.testing.assert_close((lp, h), reference(logits.float(), targets))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[3\]"):
        selective_log_softmax(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
