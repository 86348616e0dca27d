"""Continuous batching over slots: one tensor row per turn, shapes as they come.

Turns join and leave between any two passes of the model; a pass draws a token for every turn that
has been read, and reads prompts with the room that is left. Where all turns fit into memory at
full length this is cheaper than a paged cache: nothing is gathered, nothing put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import torch
from transformers import PreTrainedModel

from services.rollout.engines import attention
from services.rollout.engines.continuous import PASS_SECONDS, STEP_TOKENS, Ended
from services.rollout.engines.endings import tell
from services.rollout.engines.gate import PromptGate
from services.rollout.engines.ragged import NAME, RaggedCache, kept_as
from services.rollout.engines.sampling import Draw, draw
from services.rollout.engines.shelves import Shelves, Slot
from services.rollout.engines.slots import CACHE_BYTES, LENGTHS, Run, SlotCache, padded, slot_bytes
from services.rollout.engines.turns import Turn

log = logging.getLogger(__name__)
T = TypeVar("T")

# Rows of a pass beyond one per turn: where prompts are read, if they are not read in larger parts.
_READING_ROWS: Final = 64


class SlotBatcher:
    """One model being served by one thread; the same threads may call as of `ContinuousBatcher`."""

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
        self._running = max_running
        self._cache = self._make_cache(max_context)
        self._shelves = Shelves(self._cache)
        self._rows = max(STEP_TOKENS, self._running + _READING_ROWS)
        self._version = -1
        # Keys and values may be anything after weights that were no numbers.
        self._tainted = False
        self._gate = PromptGate()
        self._drew = drew
        self._exited = exited
        # One standstill at a time: each leaves the model as it found it only when it is alone.
        self._standing = threading.Lock()
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._inbox: deque[Turn] = deque()
        self._ended: dict[int, tuple[asyncio.AbstractEventLoop, Ended]] = {}
        self._computing = False
        self._passes = 0
        self._held = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="slot-batcher")

    def _make_cache(self, max_context: int) -> SlotCache:
        """Where keys and values are; the model is told how to attend to them."""
        model = self._model
        model.set_attn_implementation(NAME)
        return RaggedCache(
            model.config, model.dtype, running=self._running, max_context=max_context
        )

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
        that serving stood still, and no turns: none has to be resubmitted. Raises RuntimeError when
        the thread has ended or hangs.
        """
        with self._standstill():
            began = time.monotonic()
            change()
            self._version = version
            if self._tainted:
                self._cache.clear()
                self._tainted = False
            for turn in self._shelves.forget():
                if not turn.versions:
                    turn.read_tokens = 0
            self._changed()
            return time.monotonic() - began, []

    def between(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two passes; its result and the version.

        Raises as `swap`.
        """
        with self._standstill():
            return call(), self._version

    @contextlib.contextmanager
    def _standstill(self) -> Iterator[None]:
        """No pass is computed, and nobody else has this. Between two of these one pass is, so that
        turns go on however many ask. Raises RuntimeError when the thread has ended or hangs.
        """
        if not self._standing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("another call holds the model, and hangs")
        try:
            with self._state:
                self._held = True
                idle = self._state.wait_for(lambda: not self._computing, PASS_SECONDS)
            try:
                if not idle or not self.alive:
                    raise RuntimeError("the serving thread has ended or hangs")
                yield
            finally:
                with self._state:
                    self._held = False
                    self._state.notify_all()
                    self._state.wait_for(self._went_on(self._passes), PASS_SECONDS)
        finally:
            self._standing.release()

    def _went_on(self, passes: int) -> Callable[[], bool]:
        """Whether a pass has begun since there were `passes`, or none is to be."""

        def went_on() -> bool:
            work = self._inbox or self._shelves.busy
            return self._passes != passes or not work or not self.alive

        return went_on

    def _changed(self) -> None:
        """Weights were loaded; nothing is computed meanwhile."""

    def stop(self, timeout: float) -> None:
        """End the serving thread. Turns in hand are dropped."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _add(self, *turns: Turn) -> None:
        with self._state:
            self._inbox += turns
            self._state.notify_all()

    def _open_gate(self, turn: Turn) -> None:
        if followers := [one for one in self._gate.opened(turn) if not one.closed]:
            self._add(*followers)

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
            with self._state:
                self._stopping = True
                self._state.notify_all()
            self._exited(repr(error))

    def _begin(self) -> bool:
        """Wait for work and a moment in which it may be done; False at the end."""
        with self._state:
            while not self._stopping:
                if not self._held and (self._inbox or self._shelves.busy):
                    self._computing = True
                    self._passes += 1
                    self._state.notify_all()
                    turns = self._admitted()
                    break
                self._state.wait()
            else:
                return False
        self._shelves.place(turns)
        return True

    def _admitted(self) -> list[Turn]:
        """Turns that get a slot now, first come first served."""
        self._shelves.drop_closed()
        free = self._running - len(self._shelves.busy)
        turns: list[Turn] = []
        while len(turns) < free and self._inbox:
            turn = self._inbox.popleft()
            if not turn.closed:
                turns.append(turn)
        return turns

    def _pass(self) -> None:
        """Compute one pass: a token per drawing turn, and what fits of the prompts."""
        drawing: list[tuple[int, int, Slot]] = []
        reading: list[tuple[int, int, Slot]] = []
        for slot in self._shelves.busy.values():
            if (left := slot.left) == 1:
                # Neighbours in memory one after the other: they are computed where they are.
                drawing.append((padded(slot.read), slot.index, slot))
            elif left:
                reading.append((slot.used_at, slot.index, slot))
        runs: list[Run] = []
        ids: list[int] = []
        last: list[tuple[Slot, int]] = []
        room = self._rows
        for _, index, slot in sorted(drawing) + sorted(reading):
            tokens = slot.ids[slot.read : slot.read + room]
            if not tokens:
                break
            count = len(tokens)
            runs.append(Run(index, slot.read, count))
            ids += tokens
            room -= count
            slot.read += count
            assert slot.turn is not None  # busy
            if not slot.turn.versions:
                slot.turn.read_tokens += count
            if slot.read == len(slot.ids):
                last.append((slot, len(ids) - 1))
        if not runs:  # all of them were cancelled
            return
        logits = self._forward(runs, ids, [row for _, row in last])
        if last:
            self._record([slot for slot, _ in last], logits)

    def _record(self, slots: Sequence[Slot], logits: torch.Tensor) -> None:
        """Draw the next token of each slot from its row of `logits`."""
        turns = [slot.turn for slot in slots if slot.turn is not None]
        drawn = self._draw(logits, [turn.next_draw() for turn in turns])
        over: list[Turn] = []
        for slot, turn, (token, logprob) in zip(slots, turns, drawn, strict=True):
            if turn.closed:
                continue
            turn.append(token, logprob, self._version)
            slot.ids.append(token)
            if not math.isfinite(logprob):
                self._tainted = True
            if len(turn.versions) == 1:
                self._shelves.note(slot)
                self._open_gate(turn)
            if token in turn.stop_ids or turn.remaining <= 0:
                self._shelves.end(slot)
                over.append(turn)
        self._drew(len(slots))
        self._report(over)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Draw]) -> list[tuple[int, float]]:
        return list(zip(*draw(logits, rows), strict=True))

    def _forward(self, runs: Sequence[Run], ids: list[int], wanted: list[int]) -> torch.Tensor:
        """Logits of the `wanted` rows of a pass over `ids`, the tokens of `runs`."""
        self._cache.plan(runs, len(ids))
        return self._logits(ids, wanted)

    def _logits(self, ids: list[int], wanted: list[int]) -> torch.Tensor:
        """[len(wanted), vocabulary], as the cache is planned."""
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([ids]),
                position_ids=self._cache.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long),
                cache=self._cache,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _report(self, turns: Sequence[Turn]) -> None:
        """These have ended: their loop hears of all of them at once."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Ended, Turn]]] = {}
        for turn in turns:
            self._open_gate(turn)
        with self._state:
            for turn in turns:
                if (waiting := self._ended.pop(id(turn), None)) is not None:
                    told.setdefault(waiting[0], []).append((waiting[1], turn))
        for loop, some in told.items():
            loop.call_soon_threadsafe(tell, some)


def fits_slots(model: PreTrainedModel, max_running: int, max_context: int) -> bool:
    """Whether `SlotBatcher` can serve `model`: plain causal attention, and memory for as many
    turns as may run at full length."""
    if not attention.supports(model.config) or max_context > LENGTHS[-1]:
        return False
    kept = kept_as(model.dtype, max_context)
    return max_running * slot_bytes(model.config, kept, max_context) <= CACHE_BYTES
