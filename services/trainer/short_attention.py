"""Attention of short packed rows on a CPU: batched products of all heads instead of a kernel.

The kernel of `scaled_dot_product_attention` goes through rows and heads one by one, which takes
longer than their products where rows are short; its backward pass most of all. Here each block
(packing.py) is one product of all of its rows and heads, and what is gathered for it is gathered
once, for queries of a group of heads that share keys together. The weights of the queries are kept
for the backward pass, which is little beside the rest of a layer as long as rows are short.

All of it is float32, also of states that autocast made bfloat16: what would be saved is little, and
the output is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from services.trainer.packing import Block, Packing

# Keys of a row: more of them, and the kernel that keeps no weights is as fast.
_LONGEST: Final = 128
_TYPES: Final = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class _Heads:
    """Heads of queries, and those of keys and values, each of which `queries // keys` share."""

    queries: int
    keys: int


@dataclass(frozen=True)
class _Gather:
    """Where rows and heads are, in states as [token and head, D] and in the blocks' order.

    A block's queries are [n, G, H / G, Q], its keys [n, G, K], one block behind the other.
    """

    # int64: of each query and each key of the blocks, its token and head.
    queries: torch.Tensor
    keys: torch.Tensor
    # int64 [T * H]: of each token and head, its query in the blocks.
    places: torch.Tensor
    # int64: queries that stand where rows are shorter; none has a place.
    idle: torch.Tensor
    # By block, float32 [n or 1, 1, 1, Q, K]: 0 where a query attends to a key, else -inf.
    biases: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, packing: Packing, heads: _Heads, window: int | None) -> _Gather:
        by_query, by_key = torch.arange(heads.queries), torch.arange(heads.keys)
        queries, keys, slots = [], [], []
        offset = 0
        for block in packing.blocks:
            n, width, length = block.shape
            own = block.queries.view(n, 1, width) * heads.queries + by_query[:, None]
            queries.append(own.reshape(-1))
            keys.append((block.keys.view(n, 1, length) * heads.keys + by_key[:, None]).reshape(-1))
            # [n * Q, H]: where in the output the heads of the block's queries are.
            found = torch.arange(offset, offset + own.numel()).view(n, heads.queries, width)
            slots.append(found.transpose(1, 2).reshape(n * width, heads.queries))
            offset += own.numel()
        joined = torch.cat(slots)
        places = (joined if packing.place is None else joined[packing.place]).reshape(-1)
        used = torch.zeros(offset, dtype=torch.bool)
        used[places] = True
        return cls(
            torch.cat(queries),
            torch.cat(keys),
            places,
            torch.nonzero(~used)[:, 0],
            tuple(_bias(block, window) for block in packing.blocks),
        )


def is_short(packing: Packing, query: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether attention among these states is computed faster here than by a kernel."""
    plain = all(t.device.type == "cpu" and t.dtype in _TYPES for t in (query, *others))
    return plain and all(block.shape[2] <= _LONGEST for block in packing.blocks)


def short_attention(
    packing: Packing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Output [1, T, H, E] of queries [1, H, T, D], keys [1, G, T, D], values [1, G, T, E], in the
    type of the values.

    `window`: tokens that a token looks back on, itself included; None: all before it.
    """
    heads = _Heads(query.shape[1], key.shape[1])
    gather = packing.made.get((heads, window))
    if gather is None:
        gather = packing.made[heads, window] = _Gather.of(packing, heads, window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shapes = [block.shape for block in packing.blocks]
    with torch.autocast("cpu", enabled=False):
        output: torch.Tensor = _ShortAttention.apply(  # type: ignore[no-untyped-call]
            # All of it views, forward and back: [T, heads, D].
            *(states.squeeze(0).transpose(0, 1) for states in (query, key, value)),
            gather,
            heads,
            shapes,
            scale,
        )
    return output.unsqueeze(0)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gather: _Gather,
        heads: _Heads,
        shapes: Sequence[tuple[int, int, int]],
        scale: float,
    ) -> torch.Tensor:
        queries = _chosen(query, gather.queries).mul_(scale)
        keys = _chosen(key, gather.keys)
        values = _chosen(value, gather.keys)
        outputs = values.new_empty(len(queries), value.shape[-1])
        weights: list[torch.Tensor] = []
        for part, bias in zip(_parts(shapes, heads), gather.biases, strict=True):
            scores = torch.bmm(part.queries(queries), part.keys(keys).transpose(1, 2))
            n, width, length = part.shape
            apart = scores.view(n, heads.keys, -1, width, length).add_(bias)
            weights.append(torch.softmax(apart, -1).view_as(scores))
            torch.bmm(weights[-1], part.keys(values), out=part.queries(outputs))
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.gather, ctx.heads, ctx.shapes, ctx.scale = gather, heads, shapes, scale
        ctx.types = [t.dtype for t in (query, key, value)]
        found = outputs.index_select(0, gather.places).to(value.dtype)
        return found.view(len(query), heads.queries, -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values, *weights = ctx.saved_tensors
        gather: _Gather = ctx.gather
        heads: _Heads = ctx.heads
        tokens = len(grad)
        slopes = _chosen(grad, gather.queries)
        slopes.index_fill_(0, gather.idle, 0.0)
        by_query, by_key, by_value = (torch.empty_like(t) for t in (queries, keys, values))
        with torch.autocast("cpu", enabled=False):
            for part, own in zip(_parts(ctx.shapes, heads), weights, strict=True):
                slope = part.queries(slopes)
                torch.bmm(own.transpose(1, 2), slope, out=part.keys(by_value))
                by_weight = torch.bmm(slope, part.keys(values).transpose(1, 2))
                by_score = torch._softmax_backward_data(by_weight, own, -1, own.dtype)
                torch.bmm(by_score, part.keys(keys), out=part.queries(by_query))
                torch.bmm(by_score.transpose(1, 2), part.queries(queries), out=part.keys(by_key))
        found = [by_query.index_select(0, gather.places).mul_(ctx.scale)]
        for each in (by_key, by_value):
            total = each.new_zeros(tokens * heads.keys, each.shape[-1])
            found.append(total.index_add_(0, gather.keys, each))
        typed = (t.to(kind) for t, kind in zip(found, ctx.types, strict=True))
        return *(t.view(tokens, -1, t.shape[-1]) for t in typed), None, None, None, None


@dataclass(frozen=True)
class _Part:
    """Where a block's rows are among those of all blocks."""

    shape: tuple[int, int, int]
    heads: _Heads
    first_query: int
    first_key: int

    def queries(self, states: torch.Tensor) -> torch.Tensor:
        """[n * G, H / G * Q, D], a view."""
        n, width, _ = self.shape
        count = n * self.heads.queries * width
        own = states[self.first_query : self.first_query + count]
        return own.view(n * self.heads.keys, -1, states.shape[-1])

    def keys(self, states: torch.Tensor) -> torch.Tensor:
        """[n * G, K, D], a view."""
        n, _, length = self.shape
        count = n * self.heads.keys * length
        own = states[self.first_key : self.first_key + count]
        return own.view(n * self.heads.keys, length, states.shape[-1])


def _parts(shapes: Sequence[tuple[int, int, int]], heads: _Heads) -> list[_Part]:
    found, queries, keys = [], 0, 0
    for n, width, length in shapes:
        found.append(_Part((n, width, length), heads, queries, keys))
        queries += n * heads.queries * width
        keys += n * heads.keys * length
    return found


def _chosen(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """float32 [n, D]: of states [T, heads, D] those of so many tokens and heads."""
    table = states.reshape(-1, states.shape[-1])  # a view of what a projection returned
    return table.index_select(0, index).float()


def _bias(block: Block, window: int | None) -> torch.Tensor:
    _, width, length = block.shape
    mask = block.mask if window is None else block.mask_within(window)
    if mask is None:
        mask = torch.ones(1, 1, width, length, dtype=torch.bool).tril()
    # An idle query may be behind the window of all keys: nothing is made of it, but no NaN either.
    hidden = ~mask & mask.any(-1, keepdim=True)
    return torch.zeros(mask.shape).masked_fill_(hidden, -torch.inf).unsqueeze(1)
