"""Attention over transformers' paged cache without computing what the mask would throw away.

Continuous batching packs the tokens of all requests into one row. The stock `sdpa` path then
attends from every token to every key of every request and masks the rest: on a CPU, with a
hundred short conversations in a batch, over 95 % of that work is discarded (measured: 900 tok/s
against 4,400 with this function). Here requests of similar query length are padded to each
other instead, and each attends to its own keys.

Registered through `transformers.AttentionInterface`, the library's extension point; attention
itself stays `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface

NAME = "troupe_packed"
# Requests with query lengths in the same interval are padded to each other: decoding turns (1),
# the rest of a prompt whose prefix was cached, whole prompts.
_BUCKETS = (1, 16)
_FULL = "full_attention"
# Added to masked scores. Finite: a padding row sees nothing at all, and must not become NaN.
_MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests that are padded to each other, right-aligned: b of them, Q queries, K keys.

    `gather` [b*Q]: packed positions of the queries; `source`, `target`: which of the b*Q outputs
    are real and where they go; `keys` slices the padded keys; `mask` [b, 1, repeat*Q, K].
    """

    b: int
    q: int
    k: int
    gather: torch.Tensor
    source: torch.Tensor | None
    target: torch.Tensor
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """How one packed batch is cut into buckets; the same for all layers."""

    buckets: list[Bucket]
    key_index: torch.Tensor
    """[sum b*K] into the packed keys."""
    read_index: torch.Tensor | None
    """The same, composed with the cache's read index; None when nothing is read from it."""


def supports(config: Any) -> bool:
    """Whether a model with this configuration computes plain causal attention in every layer.

    Models that transformers does not run on `sdpa` have extras (caps, sinks) that we lack too.
    """
    if config._attn_implementation != "sdpa":
        return False
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds:
        return set(kinds) == {_FULL}
    return not getattr(config.get_text_config(), "sliding_window", None)


def make_plan(
    cu_q: torch.Tensor, cu_k: torch.Tensor, read_index: torch.Tensor, repeat: int
) -> Plan:
    """Plan for requests whose queries and keys end at `cu_q[1:]` and `cu_k[1:]` (packed)."""
    q_end, k_end = cu_q[1:].long(), cu_k[1:].long()
    q_len, k_len = q_end - cu_q[:-1].long(), k_end - cu_k[:-1].long()
    bucket_of = torch.bucketize(q_len, torch.tensor(_BUCKETS))
    buckets: list[Bucket] = []
    key_parts: list[torch.Tensor] = []
    start = 0
    for number in range(len(_BUCKETS) + 1):
        rows = (bucket_of == number).nonzero().squeeze(-1)
        b = rows.numel()
        if not b:
            continue
        q, k = int(q_len[rows].max()), int(k_len[rows].max())
        # Distance of each column from the request's last token: padding is on the left.
        q_back, k_back = torch.arange(q - 1, -1, -1), torch.arange(k - 1, -1, -1)
        gather = (q_end[rows] - 1).unsqueeze(1) - q_back
        key_parts.append(((k_end[rows] - 1).unsqueeze(1) - k_back).clamp_(min=0).view(-1))
        seen = (k_back < k_len[rows].unsqueeze(1)).unsqueeze(1)
        source, target = None, gather.view(-1)
        if q > 1:
            seen = seen & (k_back >= q_back.unsqueeze(1))
            source = (q_back < q_len[rows].unsqueeze(1)).view(-1).nonzero().squeeze(-1)
            target = target[source]
        mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, _MASKED)
        if q > 1:
            mask = mask.unsqueeze(1).expand(b, repeat, q, k).reshape(b, repeat * q, k)
        keys = slice(start, start + b * k)
        start = keys.stop
        gather = gather.clamp(min=0).view(-1)
        buckets.append(Bucket(b, q, k, gather, source, target, keys, mask.unsqueeze(1)))
    key_index = torch.cat(key_parts)
    return Plan(buckets, key_index, read_index[key_index] if read_index.numel() else None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `query` [1, heads, T, dim] over each request's cached and new keys.

    Called by the model in place of its stock attention, only within continuous batching (it
    needs the paged `cache` and the sequence lengths in `kwargs`). Returns [1, T, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{NAME}' attention serves continuous batching only")
    heads, kv_heads = query.shape[1], key.shape[1]
    repeat = heads // kv_heads
    # The lengths are the same tensors for all layers of a step: the plan lives beside them.
    lengths = kwargs["cu_seq_lens_k"]
    plan = lengths.get(NAME)
    if plan is None:
        read = kwargs["read_index"][0]
        plan = lengths[NAME] = make_plan(kwargs["cu_seq_lens_q"], lengths[_FULL], read, repeat)
    if plan.read_index is not None:
        kwargs["read_index"] = [plan.read_index]
    keys, values = cache.update(key, value, layer_idx=module.layer_idx, kwargs=kwargs)
    keys, values = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    if plan.read_index is None:
        keys, values = (x.index_select(0, plan.key_index) for x in (keys, values))
    tokens, dim = query.shape[2], query.shape[3]
    packed = query[0].transpose(0, 1).reshape(tokens, heads * dim)
    out = torch.empty_like(packed)
    for bucket in plan.buckets:
        b, q, k = bucket.b, bucket.q, bucket.k
        # Heads that share keys become further queries: [b, kv_heads, repeat * q, dim].
        rows = packed.index_select(0, bucket.gather).view(b, q, kv_heads, repeat, dim)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, repeat * q, dim)
        result = F.scaled_dot_product_attention(
            rows,
            keys[bucket.keys].view(b, k, kv_heads, dim).transpose(1, 2),
            values[bucket.keys].view(b, k, kv_heads, dim).transpose(1, 2),
            attn_mask=bucket.mask.to(query.dtype),
            scale=scaling,
        )
        result = result.view(b, kv_heads, repeat, q, dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(b * q, heads * dim)
        if bucket.source is not None:
            result = result.index_select(0, bucket.source)
        out.index_copy_(0, bucket.target, result)
    return out.view(1, tokens, heads, dim), None


AttentionInterface.register(NAME, packed_attention)
