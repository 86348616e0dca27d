"""The deterministic batcher: a turn is bitwise a function of (weights, prompt, seed).

Every pass of the model has one shape; unused rows are padding. Every query token attends by itself,
over a number of keys that follows from its position alone. With fixed shapes a row of a matrix
product depends neither on the other rows nor on its place among them, so prefixes may be shared and
read in any pieces. The libraries behave so on the CPUs that we know; they do not promise it, so it
is probed whenever weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from services.rollout.engines import paged_batcher
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.requests import Draw
from services.rollout.engines.sampling import draw
from services.rollout.engines.slot_batcher import SlotBatcher
from services.rollout.engines.slot_cache import MASKED, SlotCache, SlotRun, padded
from troupe.mixtures import is_mixture
from troupe.rpc.errors import FailedPrecondition

NAME: Final = "troupe_fixed"
# Turns that run at once; more wait. A pass costs the same however many rows are used.
RUNNING: Final = 64
# Rows of a pass beyond one per turn, for prompts.
READING_ROWS: Final = 64
_NOTHING: Final = Draw(temperature=1.0, top_k=-1, top_p=1.0, seed=0, position=0)


def check_architecture(config: PretrainedConfig, policy: str) -> None:
    """Raise `EngineStartFailed` for models whose passes cannot have a fixed shape."""
    if paged_batcher.supports(config) and not is_mixture(config):
        return
    raise EngineStartFailed(
        "the embedded engine computes only dense models with plain causal attention "
        "deterministically",
        field=f"policies.{policy}.model",
        value=config.model_type,
        remedy="Turn `pipeline.deterministic` off, or choose another architecture.",
    )


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

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> None:
        """`options`: those of `SlotCache`."""
        super().__init__(config, dtype, **options)
        self.groups: list[PassGroup] = []

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """Plan a pass of `size` rows, of which the first are the tokens of `runs`, in order.

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


class FixedBatcher(SlotBatcher):
    """A `SlotBatcher` whose passes have one shape.

    `swap` also raises `FailedPrecondition` (kind `not_deterministic`), when this machine does not
    compute rows independently of each other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
    ) -> None:
        super().__init__(
            model,
            max_running=min(RUNNING, max_running),
            max_context=max_context,
            drew=drew,
            exited=exited,
        )
        self._rows = self._running + READING_ROWS

    def _make_cache(self, max_context: int) -> SlotCache:
        model = self._model
        model.set_attn_implementation(NAME)
        return FixedCache(
            model.config,
            model.dtype,
            running=self._running,
            max_context=max_context,
            device=model.device,
        )

    def _weights_changed(self) -> None:
        self._cache.clear()
        self._probe()

    def _draw(self, logits: torch.Tensor, rows: Sequence[Draw]) -> list[tuple[int, float]]:
        return _draw_each(logits, rows)

    def _forward(self, runs: Sequence[SlotRun], ids: list[int], wanted: list[int]) -> torch.Tensor:
        """Logits [running, vocabulary] of the `wanted` rows, the others being padding."""
        self._cache.plan(runs, self._rows)
        padding = [0] * (self._rows - len(ids))
        return self._logits(ids + padding, wanted + [0] * (self._running - len(wanted)))

    def _probe(self) -> None:
        """Raise unless a token's logits are the same in every row, whatever the other rows are."""
        count = self._running
        singles = [SlotRun(slot, 0, 1) for slot in range(count)]
        alike = self._forward(singles, [1] * count, list(range(count))).nan_to_num()
        # NaN weights are reported by the first turn, whose log-probs are not finite.
        same = torch.equal(alike, alike[:1].expand_as(alike))
        if count > 1:
            ids = [0, 1] * (READING_ROWS // 2) + [1, 0] * count
            rows = list(range(READING_ROWS, READING_ROWS + count - 1))
            runs = [SlotRun(0, 0, READING_ROWS), *singles[1:]]
            mixed = self._forward(runs, ids[: len(rows) + READING_ROWS], rows).nan_to_num()
            mixed = mixed[: count - 1 : 2]
            same = same and torch.equal(mixed, alike[:1].expand_as(mixed))
        self._cache.clear()
        if not same:
            raise FailedPrecondition(
                "a token's logits depend on what else is in the batch on this machine",
                kind="not_deterministic",
                field="pipeline.deterministic",
                value=True,
                remedy="Turn it off, or run rollout on another kind of CPU.",
            )


def _draw_each(logits: torch.Tensor, rows: Sequence[Draw]) -> list[tuple[int, float]]:
    """Token and log-prob of the first rows of `logits`, by operations of fixed shapes.

    Rows that top-k or top-p truncate are drawn one by one; the others together.
    """
    plain = [r.top_k <= 0 and r.top_p >= 1.0 for r in rows]
    filled = [r if p else _NOTHING for r, p in zip(rows, plain, strict=True)]
    filled += [_NOTHING] * (logits.shape[0] - len(rows))
    tokens, logprobs = draw(logits, filled)
    drawn = list(zip(tokens, logprobs, strict=True))[: len(rows)]
    for index, row in enumerate(rows):
        if not plain[index]:
            [token], [logprob] = draw(logits[index : index + 1], [row])
            drawn[index] = (token, logprob)
    return drawn
