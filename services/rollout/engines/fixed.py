"""The deterministic batcher: a turn is bitwise a function of (weights, prompt, seed).

Every pass of the model has one and the same shape, rows that nothing is to be computed for being
padding; attention is that of `slots`. With fixed shapes a row of a matrix product depends neither
on the other rows nor on its own place among them. That is how the libraries behave on the CPUs
that we know, not a promise of theirs, so it is probed whenever weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines import continuous
from services.rollout.engines.base import EngineStartFailed
from services.rollout.engines.sampling import Draw, draw
from services.rollout.engines.slots import NAME, SlotCache, SlotRun
from services.rollout.engines.slotted import SlotBatcher
from troupe.rpc.errors import FailedPrecondition

# Turns that are computed at once. More wait: a pass costs the same however many rows are used.
RUNNING: Final = 64
# Rows of a pass beyond one per turn: where prompts are read.
READING_ROWS: Final = 64
_NOTHING: Final = Draw(temperature=1.0, top_k=-1, top_p=1.0, seed=0, position=0)
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def check_architecture(config: PretrainedConfig, policy: str) -> None:
    """Raise `EngineStartFailed` for models whose shapes cannot be held fixed."""
    text = config.get_text_config()
    if continuous.supports(config) and not any(getattr(text, name, None) for name in _EXPERTS):
        return
    raise EngineStartFailed(
        "the embedded engine computes only dense models with plain causal attention "
        "deterministically",
        field=f"policies.{policy}.model",
        value=config.model_type,
        remedy="Turn `pipeline.deterministic` off, or choose another architecture.",
    )


class FixedBatcher(SlotBatcher):
    """Slots with passes of one fixed shape.

    `swap` raises `FailedPrecondition` (kind `not_deterministic`) besides, when this machine does
    not compute rows independently of each other.
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
        return SlotCache(model.config, model.dtype, running=self._running, max_context=max_context)

    def _changed(self) -> None:
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
        """Is one token's result the same in every row, whatever the other rows are?"""
        count = self._running
        singles = [SlotRun(slot, 0, 1) for slot in range(count)]
        alike = self._forward(singles, [1] * count, list(range(count))).nan_to_num()
        # NaN weights are somebody else's to report, by the first turn's log-probs.
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
    """Token and log-prob for the first rows of `logits`, by operations of fixed shapes.

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
