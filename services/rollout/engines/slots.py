"""Keys and values of the deterministic engine: a row of tensors per turn, and attention over it.

Every query token attends by itself, over a number of keys that follows from its position alone.
So what a token gets does not depend on what else is in the batch, nor on whether the keys before
it were read in one piece, in several, drawn as a response, or copied from another turn: all of
that is bitwise the same, and prefixes may be shared whenever there is one.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig

NAME: Final = "troupe_fixed"
# Keys that a query attends to are padded to one of these lengths, by its position.
LENGTHS: Final = (64, 128, 192, *(base << k for k in range(16) for base in (256, 384)))
# Keys and values kept, those of ended turns included: others may begin with the same tokens.
CACHE_BYTES: Final = 512 << 20
# Slots per turn that may run.
SPARE: Final = 4
# Added to masked scores. Finite: its exponential is exactly zero, and nothing becomes NaN.
MASKED: Final = -1e30


def padded(position: int) -> int:
    """Number of keys that a token at `position` (from 0) is computed with."""
    if position < LENGTHS[0]:  # most of them, and asked for each in every pass
        return LENGTHS[0]
    return LENGTHS[bisect_left(LENGTHS, position + 1)]


class SlotRun(NamedTuple):
    """Tokens at `start` .. `start + tokens - 1` of one slot, computed in one pass."""

    slot: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PassGroup:
    """Rows [start, stop) of a pass whose queries see equally many keys.

    `slots` [stop - start], or one int when all are tokens of one slot. `mask` [rows, 1, 1, keys].
    """

    start: int
    stop: int
    keys: int
    slots: torch.Tensor | int
    mask: torch.Tensor


def slot_bytes(config: PretrainedConfig, dtype: torch.dtype, max_context: int) -> int:
    """What a turn of `max_context` tokens takes, keys and values of all layers."""
    layers = config.get_text_config().num_hidden_layers
    return int(2 * layers * math.prod(_shape(config, max_context)) * dtype.itemsize)


def _shape(config: PretrainedConfig, max_context: int) -> tuple[int, int, int]:
    """Of a slot in one layer: heads of keys, tokens, dimensions of a head."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return heads, padded(max_context - 1), dim


class SlotCache:
    """Keys and values of `count` turns, and one slot more that padding rows write to.

    `keys` and `values`: per layer [count + 1, kv_heads, length, dim]; memory is taken where it is
    written first. `slots`, `positions` [rows] and `groups` describe the pass being computed.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, *, running: int, max_context: int
    ) -> None:
        """Slots for `running` turns of `max_context` tokens, and more if `CACHE_BYTES` allow."""
        text = config.get_text_config()
        self.heads, length, dim = _shape(config, max_context)
        self.repeat: int = text.num_attention_heads // self.heads
        self.dtype = dtype
        self._layers = text.num_hidden_layers
        slot = (self.heads, length, dim)
        self._slot_bytes = math.prod(slot) * dtype.itemsize
        affordable = CACHE_BYTES // slot_bytes(config, dtype, max_context)
        self.count = max(running, min(affordable, SPARE * running))
        self._shape = (self.count + 1, *slot)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.slots = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)
        self.groups: list[PassGroup] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything: zeros, since what is masked is still multiplied with zero."""
        self.keys = [self._zeros() for _ in range(self._layers)]
        self.values = [self._zeros() for _ in range(self._layers)]

    def _zeros(self) -> torch.Tensor:
        size = self._slot_bytes * (self.count + 1)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(self._shape)

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Slots `targets` begin with the first `tokens` of slot `source`."""
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, :tokens] = tensor[source, :, :tokens]

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """The coming pass has `size` rows, the first of them the tokens of `runs`, in order.

        Single tokens with equally many keys are computed together where they are neighbours.
        """
        slots = [run.slot for run in runs for _ in range(run.tokens)]
        positions = [run.start + i for run in runs for i in range(run.tokens)]
        spare = size - len(slots)
        self.slots = torch.tensor(slots + [self.count] * spare)
        self.positions = torch.tensor(positions + [0] * spare)
        self.groups = []
        start = 0
        for (keys, single), members in groupby(runs, lambda r: (padded(r.start), r.tokens == 1)):
            if single:
                stop = start + sum(1 for _ in members)
                self.groups.append(self._group(start, stop, keys, None))
                start = stop
                continue
            for run in members:
                for keys_of_part, part in groupby(range(run.start, run.start + run.tokens), padded):
                    stop = start + sum(1 for _ in part)
                    self.groups.append(self._group(start, stop, keys_of_part, run.slot))
                    start = stop

    def _group(self, start: int, stop: int, keys: int, slot: int | None) -> PassGroup:
        hidden = torch.arange(keys) > self.positions[start:stop].unsqueeze(1)
        mask = torch.zeros(stop - start, keys, dtype=self.dtype).masked_fill_(hidden, MASKED)
        return PassGroup(
            start,
            stop,
            keys,
            self.slots[start:stop] if slot is None else slot,
            mask.view(-1, 1, 1, keys),
        )


def fixed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, heads, rows, dim], row by row, as `cache` is planned.

    Called by the model in place of its stock attention. Returns [1, rows, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{NAME}' attention serves the deterministic engine only")
    layer: Any = module.layer_idx
    keys, values = cache.keys[layer], cache.values[layer]
    keys[cache.slots, :, cache.positions] = key[0].transpose(0, 1)
    values[cache.slots, :, cache.positions] = value[0].transpose(0, 1)
    _, heads, rows, dim = query.shape
    # Heads that share keys become further queries: [rows, kv_heads, heads / kv_heads, dim].
    packed = query[0].transpose(0, 1).reshape(rows, cache.heads, heads // cache.heads, dim)
    out = torch.zeros_like(packed)
    for group in cache.groups:
        own = slice(group.start, group.stop)
        if isinstance(group.slots, int):
            shape = (group.stop - group.start, -1, -1, -1)
            k, v = (x[group.slots, :, : group.keys].expand(shape) for x in (keys, values))
        else:
            k, v = (x[:, :, : group.keys].index_select(0, group.slots) for x in (keys, values))
        out[own] = F.scaled_dot_product_attention(
            packed[own], k, v, attn_mask=group.mask, scale=scaling
        )
    return out.view(1, rows, heads, dim), None


AttentionInterface.register(NAME, fixed_attention)
