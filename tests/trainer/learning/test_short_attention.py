"""Attention of short rows by batched products equals the kernel's, in value and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.learning.sequences import attention
from services.trainer.learning.sequences.attention import packed_attention
from services.trainer.learning.sequences.packing import Packing, Segment

WIDTH = 8


def segments_of(rows: list[tuple[int, int]]) -> list[Segment]:
    """Return rows of (own tokens, length of the common beginning with the previous row, if it is
    long enough)."""
    found: list[Segment] = []
    size = 0
    for fresh, common in rows:
        before = found[-1].path[:common] if found else np.empty(0, np.int64)
        path = np.concatenate([before, np.arange(size, size + fresh)])
        found.append(Segment(path, fresh))
        size += fresh
    return found


def attend(
    packing: Packing,
    tokens: int,
    heads: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    rounds: bool = False,
    **how: Any,
) -> list[torch.Tensor]:
    """Output and gradients of random states of `dtype`, laid out as projections leave them.

    `rounds`: all that is given is rounded to bfloat16 before, whatever it is kept as.
    """
    torch.manual_seed(0)
    sizes = (heads[0], WIDTH), (heads[1], WIDTH), (heads[1], WIDTH + 2)
    drawn = [torch.randn(1, tokens, *size) for size in sizes]
    slope = torch.randn(1, tokens, heads[0], WIDTH + 2)
    if rounds:
        *drawn, slope = (t.bfloat16().float() for t in (*drawn, slope))
    leaves = [t.to(dtype).requires_grad_() for t in drawn]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    output, _ = packed_attention(torch.nn.Module(), q, k, v, None, packing=packing, **how)
    grads = torch.autograd.grad(output, leaves, slope.to(output.dtype))
    return [output.detach(), *grads]


def by_definition(
    segments: list[Segment], tokens: int, heads: tuple[int, int], window: int | None, scale: float
) -> list[torch.Tensor]:
    """The same in float64, row by row."""
    torch.manual_seed(0)
    sizes = (heads[0], WIDTH), (heads[1], WIDTH), (heads[1], WIDTH + 2)
    leaves = [torch.randn(1, tokens, *size, requires_grad=True) for size in sizes]
    slope = torch.randn(1, tokens, heads[0], WIDTH + 2)
    share = heads[0] // heads[1]
    q, k, v = (leaf.double()[0] for leaf in leaves)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    parts = torch.zeros(1, tokens, heads[0], WIDTH + 2, dtype=torch.float64)
    for segment in segments:
        path = torch.from_numpy(segment.path)
        seen = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        if window is not None:
            seen &= torch.ones_like(seen).triu(1 - window)
        scores = torch.einsum("qhd,khd->hqk", q[path], k[path]) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        own = torch.einsum("hqk,khd->qhd", weights, v[path])[segment.shared :]
        parts = parts.index_put((torch.tensor([0]), path[segment.shared :]), own)
    grads = torch.autograd.grad((parts * slope).sum(), leaves)
    return [parts.detach().float(), *grads]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=9),
    st.sampled_from([(4, 2), (2, 2), (6, 1)]),
    st.sampled_from([None, 1, 5, 100]),
    st.sampled_from([None, 0.3]),
)
def test_attention_of_short_rows_equals_its_definition(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    scaling: float | None,
) -> None:
    segments = segments_of(rows)
    tokens = sum(segment.fresh for segment in segments)
    packing = Packing.of(segments)
    found = attend(packing, tokens, heads, scaling=scaling, sliding_window=window)
    scale = WIDTH**-0.5 if scaling is None else scaling
    expected = by_definition(segments, tokens, heads, window, scale)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=2e-6)
    # Another layer of the same kind: the same bits, from the first one's indices.
    again = attend(packing, tokens, heads, scaling=scaling, sliding_window=window)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_the_kernel_computes_long_rows_and_other_precisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = torch.nn.functional.scaled_dot_product_attention
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    short = Packing.of(segments_of([(128, 0), (3, 125)]))
    attend(short, 131, (2, 1))
    assert not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(short, 131, (2, 1))
    assert not calls
    attend(short, 131, (2, 1), dtype=torch.float64)
    assert len(calls) == 2
    attend(Packing.of(segments_of([(128, 0), (4, 125)])), 132, (2, 1))
    assert len(calls) == 4


def test_rounded_states_attend_in_float32() -> None:
    packing = Packing.of(segments_of([(30, 0), (7, 20), (9, 3)]))
    states = attend(packing, 46, (4, 2), rounds=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(packing, 46, (4, 2), dtype=torch.bfloat16)
    assert {t.dtype for t in found} == {torch.bfloat16}
    for ours, own in zip(found, states, strict=True):
        # Rounded once, at the end.
        torch.testing.assert_close(ours.float(), own, rtol=2**-8, atol=1e-6)
