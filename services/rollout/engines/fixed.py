"""The deterministic batcher: a turn is bitwise a function of (weights, prompt, seed).

Every pass of the model has one and the same shape, rows that nothing is to be computed for being
padding; attention is that of `slots`. With fixed shapes a row of a matrix product depends neither
on the other rows nor on its own place among them. That is how the libraries behave on the CPUs
that we know, not a promise of theirs, so it is probed whenever weights are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines import attention
from services.rollout.engines.continuous import Ended
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.gate import PromptGate
from services.rollout.engines.sampling import Draw, draw
from services.rollout.engines.slots import NAME, Run, SlotCache, padded
from services.rollout.engines.turns import Turn
from troupe.rpc.errors import FailedPrecondition

log = logging.getLogger(__name__)

# Turns that are computed at once. More wait: a pass costs the same however many rows are used.
RUNNING: Final = 64
# Rows of a pass beyond one per turn: where prompts are read.
READING_ROWS: Final = 64
# A pass takes milliseconds. One that takes this long hangs.
PASS_SECONDS: Final = 60.0
_NOTHING: Final = Draw(temperature=1.0, top_k=-1, top_p=1.0, seed=0, position=0)
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for one turn. `ids[:read]` are the tokens whose keys and values it holds, also
    after the turn has ended: other turns may begin with them."""

    index: int
    turn: Turn | None = None
    ids: list[int] = field(default_factory=list)
    read: int = 0
    used_at: int = 0

    @property
    def left(self) -> int:
        """Tokens to read before the next one can be drawn."""
        return len(self.ids) - self.read if self.turn is not None else 0


def check_architecture(config: PretrainedConfig, policy: str) -> None:
    """Raise `EngineStartFailed` for models whose shapes cannot be held fixed."""
    text = config.get_text_config()
    if attention.supports(config) and not any(getattr(text, name, None) for name in _EXPERTS):
        return
    raise EngineStartFailed(
        "the embedded engine computes only dense models with plain causal attention "
        "deterministically",
        field=f"policies.{policy}.model",
        value=config.model_type,
        remedy="Turn `pipeline.deterministic` off, or choose another architecture.",
    )


class FixedBatcher:
    """Like `ContinuousBatcher`, with fixed shapes. The same threads may call the same methods."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
    ) -> None:
        self._model = model
        model.set_attn_implementation(NAME)
        self._running = min(RUNNING, max_running)
        self._rows = self._running + READING_ROWS
        self._cache = SlotCache(
            model.config, model.dtype, running=self._running, max_context=max_context
        )
        self._slots = [_Slot(index) for index in range(self._cache.count)]
        self._version = -1
        self._gate = PromptGate()
        self._drew = drew
        self._exited = exited
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._inbox: deque[Turn] = deque()
        self._ended: dict[int, tuple[asyncio.AbstractEventLoop, Ended]] = {}
        self._computing = False
        self._held = 0
        self._stopping = False
        self._clock = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="fixed-batcher")

    def start(self) -> None:
        """Start serving. Returns at once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the serving thread runs and takes requests."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, turn: Turn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it is over."""
        with self._state:
            self._ended[id(turn)] = (asyncio.get_running_loop(), ended)
        if self._gate.enter(turn):
            self._add(turn)

    def resubmit(self, turn: Turn, ended: Ended) -> None:
        """As `submit`; nothing calls it, since `swap` keeps its turns."""
        self.submit(turn, ended)

    def cancel(self, turn: Turn) -> None:
        """Stop working on `turn`; its `ended` is not called."""
        turn.closed = True
        with self._state:
            self._ended.pop(id(turn), None)
        self._open_gate(turn)

    def swap(self, change: Callable[[], None], version: int) -> tuple[float, list[Turn]]:
        """Run `change` between two passes; later tokens carry `version`.

        Everything computed with the old weights is forgotten and read again. Returns the seconds
        that serving stood still, and no turns: none has to be resubmitted. Raises
        `FailedPrecondition` (kind `not_deterministic`) when this machine does not compute rows
        independently of each other, and RuntimeError when the thread has ended or hangs.
        """
        with self._state:
            self._held += 1
            idle = self._state.wait_for(lambda: not self._computing, PASS_SECONDS)
        try:
            if not idle or not self.alive:
                raise RuntimeError("the serving thread has ended or hangs")
            began = time.monotonic()
            change()
            self._version = version
            self._cache.clear()
            for slot in self._slots:
                slot.read = 0
                if slot.turn is not None and not slot.turn.versions:
                    slot.turn.read_tokens = 0
            self._probe()
            return time.monotonic() - began, []
        finally:
            with self._state:
                self._held -= 1
                self._state.notify_all()

    def stop(self, timeout: float) -> None:
        """End the serving thread. Turns in hand are dropped."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _add(self, turn: Turn) -> None:
        with self._state:
            self._inbox.append(turn)
            self._state.notify_all()

    def _open_gate(self, turn: Turn) -> None:
        for follower in self._gate.opened(turn):
            if not follower.closed:
                self._add(follower)

    def _run(self) -> None:
        try:
            while self._begin():
                try:
                    self._pass()
                finally:
                    with self._state:
                        self._computing = False
                        self._state.notify_all()
        except Exception as error:
            log.exception("the serving thread ended")
            self._stopping = True
            self._exited(repr(error))

    def _begin(self) -> bool:
        """Wait for work and a moment in which it may be done; False at the end."""
        with self._state:
            while not self._stopping:
                if not self._held and (self._inbox or any(s.turn for s in self._slots)):
                    self._computing = True
                    self._admit()
                    return True
                self._state.wait()
            return False

    def _admit(self) -> None:
        """Give slots to turns, first come first served."""
        for slot in self._slots:
            if slot.turn is not None and slot.turn.closed:
                slot.turn = None
        free = self._running - sum(slot.turn is not None for slot in self._slots)
        while free and self._inbox:
            turn = self._inbox.popleft()
            if not turn.closed:
                self._place(turn)
                free -= 1

    def _place(self, turn: Turn) -> None:
        """Put `turn` where the most of its tokens are, or copy them from there."""
        ids = turn.prompt_ids + turn.token_ids
        source = max(self._slots, key=lambda s: (_common(s, ids), s.turn is None))
        known = _common(source, ids)
        target = source
        if source.turn is not None or not known:
            target = min((s for s in self._slots if s.turn is None), key=lambda s: s.used_at)
        if known and target is not source:
            self._cache.copy(source.index, target.index, known)
        self._clock += 1
        target.turn, target.ids, target.read, target.used_at = turn, ids, known, self._clock
        turn.started_at = turn.started_at or time.monotonic()

    def _pass(self) -> None:
        """Compute one pass: a token per drawing turn, and what fits of the prompts."""
        busy = [slot for slot in self._slots if slot.turn is not None]
        drawing = sorted((s for s in busy if s.left == 1), key=lambda s: padded(s.read))
        reading = sorted((s for s in busy if s.left > 1), key=lambda s: s.used_at)
        runs, ids, last = [], [], []
        room = self._rows
        for slot in drawing + reading:
            count = min(slot.left, room)
            if not count:
                break
            runs.append(Run(slot.index, slot.read, count))
            ids += slot.ids[slot.read : slot.read + count]
            room -= count
            slot.read += count
            assert slot.turn is not None  # busy
            if not slot.turn.versions:
                slot.turn.read_tokens += count
            if not slot.left:
                last.append((slot, len(ids) - 1))
        if not runs:  # all of them were cancelled
            return
        logits = self._forward(runs, ids, [row for _, row in last])
        turns = [slot.turn for slot, _ in last if slot.turn is not None]
        drawn = _draw_each(logits, [turn.next_draw() for turn in turns])
        for (slot, _), turn, (token, logprob) in zip(last, turns, drawn, strict=True):
            if turn.closed:
                continue
            turn.append(token, logprob, self._version)
            slot.ids.append(token)
            if len(turn.versions) == 1:
                self._open_gate(turn)
            if token in turn.stop_ids or turn.remaining <= 0:
                slot.turn = None
                self._report(turn)
        self._drew(len(last))

    def _forward(self, runs: Sequence[Run], ids: list[int], wanted: list[int]) -> torch.Tensor:
        """Logits [running, vocabulary] of the `wanted` rows, the others being padding."""
        self._cache.plan(runs, self._rows)
        keep = torch.tensor(wanted + [0] * (self._running - len(wanted)))
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([ids + [0] * (self._rows - len(ids))]),
                position_ids=self._cache.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
                cache=self._cache,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _report(self, turn: Turn) -> None:
        self._open_gate(turn)
        with self._state:
            waiting = self._ended.pop(id(turn), None)
        if waiting is not None:
            loop, ended = waiting
            loop.call_soon_threadsafe(ended, turn, None)

    def _probe(self) -> None:
        """Is one token's result the same in every row, whatever the other rows are?"""
        count = self._running
        singles = [Run(slot, 0, 1) for slot in range(count)]
        alike = self._forward(singles, [1] * count, list(range(count))).nan_to_num()
        # NaN weights are somebody else's to report, by the first turn's log-probs.
        same = torch.equal(alike, alike[:1].expand_as(alike))
        if count > 1:
            ids = [0, 1] * (READING_ROWS // 2) + [1, 0] * count
            rows = list(range(READING_ROWS, READING_ROWS + count - 1))
            runs = [Run(0, 0, READING_ROWS), *singles[1:]]
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


def _common(slot: _Slot, ids: list[int]) -> int:
    """Length of the longest common beginning of `ids` and what the slot holds.

    The last token always has to be computed: it gives the logits.
    """
    low, high = 0, min(slot.read, len(ids) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if slot.ids[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
