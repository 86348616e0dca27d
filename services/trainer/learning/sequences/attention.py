"""Attention over packed sequences, registered as an attention function of transformers.

On a CPU a dense mask over all T tokens would cost T^2, so rows of similar lengths form blocks
(packing.py) that are computed together: short rows by `short_attention`, others by torch's kernel.
A GPU uses a variable-length kernel in half precision, and otherwise the same blocks as a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.trainer.learning.sequences.history import Past
from services.trainer.learning.sequences.packing import Block, Packing

# Longest row, in keys, for which `short_attention` is faster than torch's kernel.
_LONGEST: Final = 128
_TYPES: Final = (torch.float32, torch.bfloat16)
# Name in `config._attn_implementation`; the registry is shared by all models of the process.
PACKED = "troupe_packed_rows"
# Arguments of some models that packed attention does not implement.
_UNKNOWN = ("softcap", "s_aux", "position_bias")
# Largest head dimension that the GPU kernel supports.
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class _Heads:
    """Number of query heads H and of key (and value) heads G; H / G queries share a key."""

    queries: int
    keys: int


@dataclass(frozen=True)
class _Gather:
    """Indices that gather states [token and head, D] into the layout of the blocks, and back.

    A block's queries are [n, G, H / G, Q], its keys [n, G, K]; blocks are concatenated.
    """

    # int64: for each query and each key of the blocks, its token and head.
    queries: torch.Tensor
    keys: torch.Tensor
    # int64 [T * H]: for each token and head, its query in the blocks.
    places: torch.Tensor
    # int64: padding queries of shorter rows.
    idle: torch.Tensor
    # By block, float32 [n or 1, 1, 1, Q, K]: 0 where a query attends to a key, else -inf.
    biases: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, packing: Packing, heads: _Heads, window: int | None) -> _Gather:
        by_query, by_key = torch.arange(heads.queries), torch.arange(heads.keys)
        queries, keys, outputs = [], [], []
        offset = 0
        for block in packing.blocks:
            n, width, length = block.shape
            own = block.queries.view(n, 1, width) * heads.queries + by_query[:, None]
            queries.append(own.reshape(-1))
            keys.append((block.keys.view(n, 1, length) * heads.keys + by_key[:, None]).reshape(-1))
            # [n * Q, H]: the positions of the heads of the block's queries in the output.
            found = torch.arange(offset, offset + own.numel()).view(n, heads.queries, width)
            outputs.append(found.transpose(1, 2).reshape(n * width, heads.queries))
            offset += own.numel()
        joined = torch.cat(outputs)
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
    """Return whether `short_attention` is faster for these states than torch's kernel."""
    if packing.past is not None:
        return False  # a piece of a sequence longer than a pass
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
    """Return the attention output [1, T, H, E], in the type of the values.

    Queries are [1, H, T, D], keys [1, G, T, D], values [1, G, T, E]. `window`: size of a sliding
    window in tokens, a token itself included; None: all tokens before it.
    """
    heads = _Heads(query.shape[1], key.shape[1])
    gather = packing.made.get((heads, window))
    if gather is None:
        gather = packing.made[heads, window] = _Gather.of(packing, heads, window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shapes = [block.shape for block in packing.blocks]
    with torch.autocast("cpu", enabled=False):
        output: torch.Tensor = _ShortAttention.apply(  # type: ignore[no-untyped-call]
            # Views as [T, heads, D], forward and backward.
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
        of_queries, of_keys = _shapes(shapes, heads)
        q, out = (_split(states, of_queries) for states in (queries, outputs))
        k, v = (_split(states, of_keys) for states in (keys, values))
        for i, ((n, width, length), bias) in enumerate(zip(shapes, gather.biases, strict=True)):
            scores = torch.bmm(q[i], k[i].transpose(1, 2))
            apart = scores.view(n, heads.keys, -1, width, length).add_(bias)
            weights.append(torch.softmax(apart, -1).view_as(scores))
            torch.bmm(weights[i], v[i], out=out[i])
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
        of_queries, of_keys = _shapes(ctx.shapes, heads)
        slope, q, to_q = (_split(states, of_queries) for states in (slopes, queries, by_query))
        k, v, to_k, to_v = (_split(t, of_keys) for t in (keys, values, by_key, by_value))
        with torch.autocast("cpu", enabled=False):
            for i, own in enumerate(weights):
                torch.bmm(own.transpose(1, 2), slope[i], out=to_v[i])
                by_weight = torch.bmm(slope[i], v[i].transpose(1, 2))
                by_score = torch._softmax_backward_data(by_weight, own, -1, own.dtype)
                torch.bmm(by_score, k[i], out=to_q[i])
                torch.bmm(by_score.transpose(1, 2), q[i], out=to_k[i])
        found = [by_query.index_select(0, gather.places).mul_(ctx.scale)]
        for each in (by_key, by_value):
            total = each.new_zeros(tokens * heads.keys, each.shape[-1])
            found.append(total.index_add_(0, gather.keys, each))
        typed = (t.to(kind) for t, kind in zip(found, ctx.types, strict=True))
        return *(t.view(tokens, -1, t.shape[-1]) for t in typed), None, None, None, None


def _shapes(
    blocks: Sequence[tuple[int, int, int]], heads: _Heads
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return, by block, the shape of its queries, (n * G, H / G * Q), and of its keys, (n * G,
    K)."""
    times = heads.queries // heads.keys
    return (
        [(n * heads.keys, times * width) for n, width, _ in blocks],
        [(n * heads.keys, length) for n, _, length in blocks],
    )


def _split(states: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return views of each block's states, [*shape, D], in the states of all blocks, [n, D]."""
    parts = torch.split(states, [rows * length for rows, length in shapes])
    return [part.view(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


def _chosen(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return float32 [n, D]: the states [T, heads, D] of the tokens and heads in `index`."""
    table = states.reshape(-1, states.shape[-1])  # a view of a projection's output
    return table.index_select(0, index).float()


def _bias(block: Block, window: int | None) -> torch.Tensor:
    _, width, length = block.shape
    mask = block.mask if window is None else block.mask_within(window)
    if mask is None:
        mask = torch.ones(1, 1, width, length, dtype=torch.bool).tril()
    # A padding query may have no key in its window: then it attends to all, to avoid NaN.
    hidden = ~mask & mask.any(-1, keepdim=True)
    return torch.zeros(mask.shape).masked_fill_(hidden, -torch.inf).unsqueeze(1)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [B, T, H, D] of queries [B, H, T, D], keys and values [B, G, T,
    D].

    Without `packing`: plain causal attention over rows without left padding. Raises ValueError for
    arguments that it does not implement, from which `capabilities_of` finds that the model cannot
    pack.
    """
    if packing is None:
        if attention_mask is None and sliding_window is not None:
            attention_mask = _band(query.shape[2], sliding_window, query.device)
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return output, None
    odd = sorted(name for name in _UNKNOWN if kwargs.get(name) is not None)
    if odd or dropout or attention_mask is not None or len(query) != 1:
        raise ValueError(f"packed attention does not support {odd or 'dropout, mask or batch'}")
    if is_short(packing, query, key, value):
        return short_attention(packing, query, key, value, scaling, sliding_window), None
    if torch.is_autocast_enabled(query.device.type):  # cast before gathering: half the bytes
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if packing.past is not None:
        key, value = _with_others(packing, packing.past, module, key, value)
    if _has_kernel(query, value):
        return _any_lengths(packing, query, key, value, scaling, sliding_window), None
    outputs = [
        _attend(block, query, key, value, scaling, sliding_window) for block in packing.blocks
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packing.place is not None:
        joined = joined.index_select(0, packing.place)
    return joined.unsqueeze(0), None


def _with_others(
    packing: Packing, past: Past, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [1, G, K, D] and values of a piece's own tokens (of all ranks that divide the
    pass), then of the earlier tokens that they attend to."""
    if packing.slices is not None:
        key, value = packing.slices.gather(key, value, packing.slice_tokens)
    if past.keeps:
        past.history.keep(past.piece, layer, key, value)
    joined: tuple[torch.Tensor, torch.Tensor] = _Joined.apply(key, value, past, layer)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    """Keys and values of a piece, then of earlier pieces, which are constants here.

    Their gradients are added up in the history, and enter the gradient of the piece that computed
    them when that piece is differentiated, after all of its readers.
    """

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, past: Past, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = [key], [value]
        for piece, index in past.earlier:
            kept = past.history.of(piece, layer)
            assert kept is not None, "an earlier pass keeps the piece"
            keys.append(kept.key if index is None else kept.key.index_select(2, index))
            values.append(kept.value if index is None else kept.value.index_select(2, index))
        ctx.past, ctx.layer = past, layer
        ctx.sizes = [one.shape[2] for one in keys]
        return torch.cat(keys, 2), torch.cat(values, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, by_key: torch.Tensor, by_value: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        past: Past = ctx.past
        own_key, *keys = torch.split(by_key, ctx.sizes, 2)
        own_value, *values = torch.split(by_value, ctx.sizes, 2)
        for (piece, index), one, other in zip(past.earlier, keys, values, strict=True):
            kept = past.history.of(piece, ctx.layer)
            assert kept is not None, "it is forgotten after its own backward pass"
            kept.add(index, one, other)
        kept = past.history.of(past.piece, ctx.layer)
        if kept is not None and kept.by_key is not None and kept.by_value is not None:
            own_key = own_key + kept.by_key.to(own_key.dtype)
            own_value = own_value + kept.by_value.to(own_value.dtype)
        return own_key, own_value, None, None


def _attend(
    block: Block,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output [n * Q, H, D] of a block."""
    n, width, length = block.shape
    mask = block.mask if window is None else block.mask_within(window)
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None and query.is_cuda:  # no fast kernel supports both
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        grouped = False
    output = scaled_dot_product_attention(
        _rows(query, block.queries, block.start, n, width),
        _rows(key, block.keys, block.start, n, length),
        _rows(value, block.keys, block.start, n, length),
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=grouped,
    )
    return output.transpose(1, 2).reshape(n * width, *output.shape[1::2])


def _rows(
    states: torch.Tensor, index: torch.Tensor, start: int | None, n: int, length: int
) -> torch.Tensor:
    """Return states [n, heads, length, D] of rows in [1, heads, T, D]; a view for contiguous
    tokens."""
    if start is None:
        chosen = states[0].index_select(1, index)
    else:
        chosen = states[0, :, start : start + n * length]
    return chosen.view(len(chosen), n, length, -1).transpose(0, 1)


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD


def _any_lengths(
    packing: Packing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, ends = packing.cumulative
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if not packing.ordered:
        keys, values = (t.index_select(0, packing.paths) for t in (keys, values))
    # If a row has fewer queries than keys, the kernel treats the queries as the row's last tokens.
    output = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        starts,
        ends,
        max(packing.query_lengths),
        max(packing.key_lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a sliding window, bool [1, 1, length, length]; None if it hides
    nothing."""
    if length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return (ones.tril() & ones.triu(1 - window))[None, None]


AttentionInterface.register(PACKED, packed_attention)
