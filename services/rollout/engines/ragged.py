"""Attention over slots without fixed shapes: what is cheapest for the pass at hand.

Turns that draw attend together, over as many keys as the longest of them has, and without a copy
where their slots are neighbours or nearly so. Prompts that are read are padded to others of similar
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig

from services.rollout.engines.slots import MASKED, Run, SlotCache, padded

NAME: Final = "troupe_slots"
# Up to so many keys a drawing turn attends by two products, which cost three quarters of the fused
# kernel at 20 keys; at 300 the kernel is the cheaper one.
_FEW_KEYS: Final = 64
# torch's softmax of shorter rows computes number by number: 1,024 rows of 15 take 282 microseconds,
# of 16 take 20. No slot is shorter.
_LEAST_KEYS: Final = 16
# Slots computed for each turn that draws, where others lie between theirs: to copy keys and values
# of a turn takes longer than to attend for one that does not draw.
_COVERED: Final = 1.5


@dataclass(frozen=True, slots=True)
class Members:
    """Runs that are padded to each other, right-aligned: b of them, Q queries, K keys.

    `rows`: their packed rows, one after the other. `gather` [b * Q]: rows of the queries, `real`:
    which of these are one; None: they are `rows`. `slots`: where their keys are.
    """

    b: int
    q: int
    k: int
    rows: slice
    gather: torch.Tensor | None
    real: torch.Tensor | None
    slots: slice | torch.Tensor
    # [b, 1, repeat * Q, K]
    mask: torch.Tensor


class RaggedCache(SlotCache):
    """Slots whose passes are planned by what they consist of."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, *, running: int, max_context: int
    ) -> None:
        """As `SlotCache`, of a model of `dtype`."""
        kept = kept_as(dtype, max_context)
        super().__init__(config, kept, running=running, max_context=max_context)
        self.members: list[Members] = []
        # [rows * kv_heads]: where the pass's keys go, in a layer's keys as [..., dim].
        self.places = torch.empty(0, dtype=torch.long)

    def plan(self, runs: Sequence[Run], size: int) -> None:
        """The coming pass has `size` rows, which are the tokens of `runs`, in order."""
        rows = [(slot, start + i) for slot, start, count in runs for i in range(count)]
        slots, positions = zip(*rows, strict=True)
        self.slots, self.positions = torch.tensor(slots), torch.tensor(positions)
        heads = self.slots.unsqueeze(1) * self.heads + torch.arange(self.heads)
        self.places = (heads * self.keys[0].shape[2] + self.positions.unsqueeze(1)).view(-1)
        self.members = []
        start = 0
        for _, group in groupby(runs, _alike):
            some = list(group)
            self.members.append(self._members(some, start))
            start = self.members[-1].rows.stop

    def _members(self, runs: Sequence[Run], start: int) -> Members:
        numbers, starts, lengths = zip(*runs, strict=True)
        counts = torch.tensor(lengths)
        ends = torch.tensor(starts) + counts
        b, q, k = len(runs), max(lengths), max(int(ends.max()), _LEAST_KEYS)
        first = min(numbers)
        span = max(numbers) + 1 - first
        if q == 1 and b < span <= _COVERED * b:
            return self._covering(slice(first, first + span), numbers, ends, start, k)
        rows = slice(start, start + sum(lengths))
        # Distance of each query from its run's last token: padding is on the left.
        back = torch.arange(q - 1, -1, -1)
        hidden = torch.arange(k) > (ends.unsqueeze(1) - 1 - back).unsqueeze(2)
        mask = torch.zeros(b, 1, q, k, dtype=self.dtype)
        mask.masked_fill_(hidden.unsqueeze(1), MASKED)
        mask = mask.expand(b, self.repeat, q, k).reshape(b, 1, self.repeat * q, k)
        gather = real = None
        if b * q != rows.stop - rows.start:
            gather = start + counts.cumsum(0).unsqueeze(1) - 1 - back
            real = (back < counts.unsqueeze(1)).view(-1).nonzero().squeeze(-1)
            gather = gather.clamp_(min=start).view(-1)
        beside = numbers == tuple(range(first, first + b))
        where = slice(first, first + b) if beside else torch.tensor(numbers)
        return Members(b, q, k, rows, gather, real, where, mask)

    def _covering(
        self, slots: slice, numbers: Sequence[int], ends: torch.Tensor, start: int, k: int
    ) -> Members:
        """Of turns that draw in the slots `numbers`, computed for all `slots`."""
        b = slots.stop - slots.start
        real = torch.tensor(numbers) - slots.start
        gather = torch.full((b,), start)
        gather[real] = torch.arange(start, start + len(numbers))
        seen = torch.ones(b, dtype=torch.long)
        seen[real] = ends
        mask = torch.zeros(b, 1, 1, k, dtype=self.dtype)
        mask.masked_fill_((torch.arange(k) >= seen.unsqueeze(1)).view(b, 1, 1, k), MASKED)
        mask = mask.expand(b, 1, self.repeat, k)
        rows = slice(start, start + len(numbers))
        return Members(b, 1, k, rows, gather, real, slots, mask)


def kept_as(dtype: torch.dtype, max_context: int) -> torch.dtype:
    """Type of the keys and values of a model of `dtype`.

    Half precision would lose the scores' digits between two products, and the fused kernel takes
    twice as long as them: float32 where all turns attend by products. Longer contexts are read
    faster in half precision, and need the memory.
    """
    few = padded(max_context - 1) <= _FEW_KEYS
    return torch.promote_types(dtype, torch.float32) if few else dtype


def _alike(run: Run) -> tuple[int, int]:
    """Runs with the same value are padded to each other where they are neighbours."""
    return run.tokens.bit_length(), padded(run.start + run.tokens - 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: RaggedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, heads, rows, dim], as `cache` is planned.

    Called by the model in place of its stock attention. Returns [1, rows, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{NAME}' attention serves the embedded engine only")
    layer: Any = module.layer_idx
    keys, values = cache.keys[layer], cache.values[layer]
    _, heads, rows, dim = query.shape
    for kept, new in ((keys, key), (values, value)):
        fresh = new[0].transpose(0, 1).reshape(-1, dim).to(kept.dtype)
        kept.view(-1, dim).index_copy_(0, cache.places, fresh)
    repeat = heads // cache.heads
    packed = query[0].transpose(0, 1).reshape(rows, heads * dim).to(cache.dtype)
    out = torch.empty_like(packed)
    for some in cache.members:
        b, q, k = some.b, some.q, some.k
        chosen = packed[some.rows] if some.gather is None else packed[some.gather]
        # Heads that share keys become further queries: [b, kv_heads, repeat * q, dim].
        asked = chosen.view(b, q, cache.heads, repeat, dim).permute(0, 2, 3, 1, 4)
        few = q == 1 and k <= _FEW_KEYS and cache.dtype == torch.float32
        attend = _products if few else _fused
        result = attend(
            asked.reshape(b, cache.heads, repeat * q, dim),
            keys[:, :, :k][some.slots],
            values[:, :, :k][some.slots],
            some.mask,
            dim**-0.5 if scaling is None else scaling,
        )
        result = result.view(b, cache.heads, repeat, q, dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(b * q, heads * dim)
        out[some.rows] = result if some.real is None else result[some.real]
    return out.view(1, rows, heads, dim).to(query.dtype), None


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale).add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1), value)


AttentionInterface.register(NAME, slot_attention)
