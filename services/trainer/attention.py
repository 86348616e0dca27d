"""Attention over packed sequences, as an attention function of transformers.

What is cheapest depends on the device. On a CPU a dense mask over all T tokens would cost T^2;
so rows of similar lengths are laid side by side for attention alone (packing.py). A GPU has a
kernel for sequences of any lengths, in half precision; else it does as a CPU does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.trainer.packing import Block, Packing
from services.trainer.short_attention import is_short, short_attention

# Name in `config._attn_implementation`: one for all of a process, in which an engine's may be too.
PACKED = "troupe_packed_rows"
# What some models ask of attention besides.
_UNKNOWN = ("softcap", "s_aux", "position_bias")
# Dimensions of a head that the GPU kernel takes.
_LARGEST_HEAD = 256


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
    """Attention output [B, T, H, D] of queries [B, H, T, D], keys and values [B, G, T, D].

    Without `packing` plain causal attention, whose rows have no padding in front. Raises
    ValueError for what it cannot do; then the model is not packed (forward.py).
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
        raise ValueError(f"packed attention knows no {odd or 'dropout, mask or batch'}")
    if is_short(packing, query, key, value):
        return short_attention(packing, query, key, value, scaling, sliding_window), None
    if torch.is_autocast_enabled(query.device.type):  # here, where it halves what is gathered
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if _has_kernel(query, value):
        return _any_lengths(packing, query, key, value, scaling, sliding_window), None
    outputs = [
        _attend(block, query, key, value, scaling, sliding_window) for block in packing.blocks
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packing.place is not None:
        joined = joined.index_select(0, packing.place)
    return joined.unsqueeze(0), None


def _attend(
    block: Block,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Output [n * Q, H, D] of a block."""
    n, width, length = block.shape
    mask = block.mask if window is None else block.mask_within(window)
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None and query.is_cuda:  # no fast kernel takes both
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
    """[n, heads, length, D] of [1, heads, T, D]; a view where tokens lie side by side."""
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
    if packing.query_lengths != packing.key_lengths:
        keys, values = (t.index_select(0, packing.paths) for t in (keys, values))
    # Fewer queries than keys: they are a row's last tokens.
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
    """bool [1, 1, length, length] of a sliding window, None where it does not matter."""
    if length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return (ones.tril() & ones.triu(1 - window))[None, None]


AttentionInterface.register(PACKED, packed_attention)
