"""Attention over slots, which a model calls in place of its stock attention.

A `SlotCache` plans each pass and its attention function reads the plan: `RaggedCache` pads runs of
like lengths to each other; `FixedCache` computes every query by itself, for turns that are bitwise
a function of weights, prompt and seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from services.rollout.engines.embedded.cache import MASKED, SlotCache, SlotRun, padded
from services.rollout.engines.errors import EngineStartFailed
from troupe.mixtures import is_mixture

RAGGED: Final = "troupe_slots"
FIXED: Final = "troupe_fixed"
# Up to so many keys a drawing turn attends by two products, which cost three quarters of the fused
# kernel at 20 keys; at 300 the kernel is the cheaper one.
_FEW_KEYS: Final = 64
# torch's softmax of shorter rows computes number by number: 1,024 rows of 15 take 282 microseconds,
# of 16 take 20. No slot is shorter.
_LEAST_KEYS: Final = 16
# Slots that a pass attends to in place in the time that one slot takes whose keys and values are
# copied first. If the turns' slots and all slots between them are fewer than this for each turn,
# the pass computes all of them.
_COPIED: Final = 2.25
# Numbers of keys and values read in the time that a further call of attention takes.
_CALL: Final = 65_536
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


def windows_of(config: PretrainedConfig) -> list[int | None]:
    """For each layer the number of last keys that a query sees, itself included; None: all."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or None
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [window] * text.num_hidden_layers
    return [window if kind == _SLIDING else None for kind in kinds]


def check_attention(model: PreTrainedModel, policy: str, *, deterministic: bool) -> None:
    """Raise `EngineStartFailed` for models with attention that is not computed over slots."""
    config = model.config
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - {_FULL, _SLIDING}
    problem = ""
    if getattr(text, "attn_logit_softcapping", None):
        problem = "caps attention scores"
    elif others:
        problem = f"has layers with {', '.join(sorted(others))}"
    elif config._attn_implementation != "sdpa" and not _has_sinks(model):
        problem = "has attention that transformers does not compute with `sdpa`"
    if problem:
        raise EngineStartFailed(
            f"the model {problem}, which the embedded engine does not",
            field=f"policies.{policy}.engine.kind",
            value="embedded",
            remedy="Serve this model with `kind: sglang`.",
        )
    plain = config._attn_implementation == "sdpa" and set(windows_of(config)) == {None}
    if not deterministic or (plain and not is_mixture(config)):
        return
    raise EngineStartFailed(
        "the embedded engine computes only dense models with plain causal attention "
        "deterministically",
        field=f"policies.{policy}.model",
        value=config.model_type,
        remedy="Turn `pipeline.deterministic` off, or choose another architecture.",
    )


def _has_sinks(model: PreTrainedModel) -> bool:
    """Whether softmaxes of attention have a further, learned score per head (gpt-oss)."""
    return any(hasattr(module, "sinks") for module in model.modules())


@dataclass(frozen=True, slots=True)
class PaddedRuns:
    """b runs that are padded to each other, right-aligned, to Q queries and K keys.

    `rows`: their rows in the pass. `gather` [b * Q]: the row of each query; `real`: indices of
    those that are no padding; both None where there is none. `slots`: the slots of their keys.
    `masks`: by the window of a layer (`windows_of`).
    """

    b: int
    q: int
    k: int
    rows: slice | torch.Tensor
    gather: torch.Tensor | None
    real: torch.Tensor | None
    slots: slice | torch.Tensor
    # Each [b, 1, repeat * Q, K].
    masks: dict[int | None, torch.Tensor]

    def to(self, device: torch.device) -> PaddedRuns:
        """The same with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("rows", "gather", "real", "slots")
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        moved["masks"] = {window: mask.to(device) for window, mask in self.masks.items()}
        return replace(self, **moved)


class RaggedCache(SlotCache):
    """Slots whose passes are computed run by run, padded to runs of like length."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, *, max_context: int, **options: Any
    ) -> None:
        """`options`: as for `SlotCache`."""
        kept = cache_dtype(dtype, max_context)
        super().__init__(config, kept, max_context=max_context, **options)
        self.windows = windows_of(config)
        self.padded_runs: list[PaddedRuns] = []
        # The pass's rows in the order of its runs; None: from 0 on.
        self._rows: torch.Tensor | None = None
        # [rows * kv_heads]: indices of the pass's keys in a layer's keys as [..., dim].
        self.key_rows = torch.empty(0, dtype=torch.long)

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """Plan a pass whose `size` rows are the tokens of `runs`."""
        tokens = [(slot, start + i) for slot, start, count, _ in runs for i in range(count)]
        rows = [row + i for _, _, count, row in runs for i in range(count)]
        self._rows = None
        if rows != list(range(size)):
            self._rows = torch.tensor(rows)
            tokens = [token for _, token in sorted(zip(rows, tokens, strict=True))]
        slots, positions = zip(*tokens, strict=True)
        self.slots, self.positions = torch.tensor(slots), torch.tensor(positions)
        heads = self.slots.unsqueeze(1) * self.heads + torch.arange(self.heads)
        self.key_rows = (heads * self.keys[0].shape[2] + self.positions.unsqueeze(1)).view(-1)
        groups: list[list[SlotRun]] = []
        for _, some in groupby(runs, _like_lengths):
            group = list(some)
            joined = [*groups[-1], *group] if groups else group
            if groups and self._cost(joined) < self._cost(groups[-1]) + self._cost(group):
                groups[-1] = joined
            else:
                groups.append(group)
        self.padded_runs = []
        start = 0
        for group in groups:
            self.padded_runs.append(self._padded(group, start))
            start += sum(run.tokens for run in group)

    def _cost(self, runs: Sequence[SlotRun]) -> float:
        """Numbers of keys read in the time that runs take which are padded to each other."""
        if max(run.tokens for run in runs) > 1:
            return math.inf
        numbers, ends = {run.slot for run in runs}, max(run.start for run in runs) + 1
        computed = min(max(numbers) + 1 - min(numbers), _COPIED * len(numbers))
        return _CALL + 2 * computed * ends * self.heads * self.keys[0].shape[3]

    def to_device(self) -> None:
        """Move the plan to where the model is."""
        super().to_device()
        self.key_rows = self.key_rows.to(self.device)
        if self.device.type != "cpu":
            self.padded_runs = [one.to(self.device) for one in self.padded_runs]

    def _padded(self, runs: Sequence[SlotRun], start: int) -> PaddedRuns:
        """Pad `runs`, whose tokens are the pass's from number `start` on."""
        numbers, starts, lengths, _ = zip(*runs, strict=True)
        counts = torch.tensor(lengths)
        ends = torch.tensor(starts) + counts
        b, q, k = len(runs), max(lengths), max(int(ends.max()), _LEAST_KEYS)
        first = min(numbers)
        span = max(numbers) + 1 - first
        adjacent = numbers == tuple(range(first, first + b))
        if q == 1 and not adjacent and span <= _COPIED * b:
            return self._covering(slice(first, first + span), numbers, ends, start, k)
        count = sum(lengths)
        # Distance of each query from its run's last token: padding is on the left.
        back = torch.arange(q - 1, -1, -1)
        masks = self._masks(ends.unsqueeze(1) - 1 - back, k)
        gather = real = None
        if b * q != count:
            gather = start + counts.cumsum(0).unsqueeze(1) - 1 - back
            real = (back < counts.unsqueeze(1)).view(-1).nonzero().squeeze(-1)
            gather = self._in_pass(gather.clamp_(min=start).view(-1))
        where = slice(first, first + b) if adjacent else torch.tensor(numbers)
        return PaddedRuns(b, q, k, self._rows_of(start, count), gather, real, where, masks)

    def _rows_of(self, start: int, count: int) -> slice | torch.Tensor:
        """The rows of so many tokens of the pass's runs, from number `start` on."""
        if self._rows is None:
            return slice(start, start + count)
        return self._rows[start : start + count]

    def _in_pass(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of the tokens with these numbers."""
        return numbers if self._rows is None else self._rows[numbers]

    def _covering(
        self, slots: slice, numbers: Sequence[int], ends: torch.Tensor, start: int, k: int
    ) -> PaddedRuns:
        """Runs of one query in the slots `numbers`, computed for all `slots` between them."""
        b = slots.stop - slots.start
        real = torch.tensor(numbers) - slots.start
        gather = torch.full((b,), start)
        gather[real] = torch.arange(start, start + len(numbers))
        seen = torch.ones(b, dtype=torch.long)
        seen[real] = ends
        masks = self._masks(seen.unsqueeze(1) - 1, k)
        rows = self._rows_of(start, len(numbers))
        return PaddedRuns(b, 1, k, rows, self._in_pass(gather), real, slots, masks)

    def _masks(self, positions: torch.Tensor, keys: int) -> dict[int | None, torch.Tensor]:
        """Masks of queries at `positions` [b, Q] over so many keys, by window."""
        b, q = positions.shape
        key, last = torch.arange(keys), positions.unsqueeze(2)
        masks: dict[int | None, torch.Tensor] = {}
        for window in set(self.windows):
            hidden = key > last
            if window is not None:
                hidden = hidden | (key <= last - window)
            mask = torch.zeros(b, 1, q, keys, dtype=self.dtype)
            mask.masked_fill_(hidden.unsqueeze(1), MASKED)
            mask = mask.expand(b, self.repeat, q, keys).reshape(b, 1, self.repeat * q, keys)
            masks[window] = mask
        return masks


def cache_dtype(dtype: torch.dtype, max_context: int) -> torch.dtype:
    """The dtype of keys and values of a model of `dtype`.

    float32 where all turns attend by two products: half precision would lose digits of the scores
    between them, and the fused kernel takes twice as long. Longer contexts are faster, and smaller,
    in half precision.
    """
    few = padded(max_context - 1) <= _FEW_KEYS
    return torch.promote_types(dtype, torch.float32) if few else dtype


def _like_lengths(run: SlotRun) -> tuple[int, int]:
    """The grouping key of runs: equal neighbours are padded to each other."""
    return run.tokens.bit_length(), padded(run.start + run.tokens - 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: RaggedCache | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, heads, rows, dim], as `cache` is planned.

    `s_aux` [heads]: a score of each softmax that belongs to no key. Returns [1, rows, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{RAGGED}' attention serves the embedded engine only")
    layer: Any = module.layer_idx
    keys, values = cache.keys[layer], cache.values[layer]
    _, heads, rows, dim = query.shape
    for kept, new in ((keys, key), (values, value)):
        fresh = new[0].transpose(0, 1).reshape(-1, dim).to(kept.dtype)
        kept.view(-1, dim).index_copy_(0, cache.key_rows, fresh)
    repeat = heads // cache.heads
    packed = query[0].transpose(0, 1).reshape(rows, heads * dim).to(cache.dtype)
    out = torch.empty_like(packed)
    for some in cache.padded_runs:
        b, q, k = some.b, some.q, some.k
        chosen = packed[some.rows] if some.gather is None else packed[some.gather]
        # Heads that share keys become further queries: [b, kv_heads, repeat * q, dim].
        asked = chosen.view(b, q, cache.heads, repeat, dim).permute(0, 2, 3, 1, 4)
        few = q == 1 and k <= _FEW_KEYS and cache.dtype == torch.float32
        attend = _products if few or s_aux is not None else _fused
        result = attend(
            asked.reshape(b, cache.heads, repeat * q, dim),
            keys[:, :, :k][some.slots],
            values[:, :, :k][some.slots],
            some.masks[cache.windows[layer]],
            dim**-0.5 if scaling is None else scaling,
            s_aux,
        )
        result = result.view(b, cache.heads, repeat, q, dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(b * q, heads * dim)
        out[some.rows] = result if some.real is None else result[some.real]
    return out.view(1, rows, heads, dim).to(query.dtype), None


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    assert sinks is None
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale).add_(mask)
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), value)
    b, heads, rows, _ = scores.shape
    repeat = sinks.numel() // heads
    further = sinks.view(1, heads, repeat, 1).expand(b, -1, -1, rows // repeat)
    further = further.reshape(b, heads, rows, 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, further], dim=-1), dim=-1)
    return torch.matmul(weights[..., :-1], value)


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


class FixedCache(SlotCache):
    """Slots whose passes have a fixed number of rows; `groups` are those that see equally many
    keys."""

    # The probe of a batcher uses all of them.
    one_per_turn = True

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> None:
        """`options`: as for `SlotCache`."""
        super().__init__(config, dtype, **options)
        self.groups: list[PassGroup] = []

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """Plan a pass of `size` rows, of which the first are the tokens of `runs`, in this order.

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

    def to_device(self) -> None:
        """Move the plan to where the model is."""
        super().to_device()
        if self.device.type != "cpu":
            self.groups = [
                replace(
                    one,
                    slots=one.slots if isinstance(one.slots, int) else one.slots.to(self.device),
                    mask=one.mask.to(self.device),
                )
                for one in self.groups
            ]

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
    cache: FixedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, heads, rows, dim], row by row, as `cache` is planned.

    Returns [1, rows, heads, dim].
    """
    if cache is None:
        raise ValueError(f"'{FIXED}' attention serves the deterministic engine only")
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


AttentionInterface.register(RAGGED, slot_attention)
AttentionInterface.register(FIXED, fixed_attention)
