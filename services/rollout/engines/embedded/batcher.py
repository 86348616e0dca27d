"""Continuous batching over slots: one tensor row per turn.

Turns join and leave between any two passes of the model; a pass draws a token for every turn whose
prompt has been read, and reads prompts with the rows that are left. Turns of several policies and
versions, which are adapters over the model's weights, share passes: rows of one adapter lie side by
side there (adapters.py), while attention takes turns in the order of their slots.

A deterministic batcher makes a turn bitwise a function of (weights, prompt, seed): every pass has
one shape, unused rows being padding, and every query attends by itself, over a number of keys that
follows from its position alone. With fixed shapes a row of a matrix product depends neither on the
other rows nor on its place among them, so prefixes may be shared and read in any pieces. The
libraries behave so on the CPUs that we know; they do not promise it, so it is probed whenever
weights are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.adapters import (
    AdaptedLayers,
    LiveVersion,
    RowAdapter,
    RowSpan,
)
from services.rollout.engines.embedded.attention import (
    FIXED,
    RAGGED,
    FixedCache,
    RaggedCache,
    cache_dtype,
)
from services.rollout.engines.embedded.cache import (
    LENGTHS,
    SPARE,
    KVSlot,
    SlotAllocator,
    SlotCache,
    SlotRun,
    cache_bytes,
    counted,
    padded,
    slot_bytes,
)
from services.rollout.engines.embedded.sampling import draw
from services.rollout.engines.requests import Draw
from services.rollout.engines.turns import EngineTurn, PromptGate
from troupe.mixtures import RecordedRoutes, Routers
from troupe.rpc.errors import FailedPrecondition
from troupe.scheduling.defaults import EMBEDDED_CONTEXT

log = logging.getLogger(__name__)

# Called in the event loop when a turn has ended, with the error if it failed.
Ended = Callable[[EngineTurn, str | None], None]
T = TypeVar("T")

# Tokens per pass. Larger passes read long prompts sooner, but on a CPU their matrices leave the
# cache: measured best between 256 and 512 for models of 0.1 to 1.5 M parameters.
STEP_TOKENS: Final = 512
# Rows of a pass beyond one per turn, for prompts, if those are not read in larger parts.
READING_ROWS: Final = 64
# Turns that run at once in a deterministic batcher; more wait. A pass costs the same however many
# rows are used.
FIXED_RUNNING: Final = 64
# A pass takes milliseconds. One that takes this long hangs.
PASS_SECONDS: Final = 60.0
# Turns whose end the event loop hears of at once, and its iterations before the next group: about
# what a trajectory takes from its last token to the store's next call.
NOTIFY_GROUP: Final = 64
NOTIFY_ITERATIONS: Final = 12
_NOTHING: Final = Draw(temperature=1.0, top_k=-1, top_p=1.0, seed=0, position=0)


def default_room(model: PreTrainedModel, max_running: int) -> int:
    """Tokens of the longest default context: four slots per turn of that length fit into
    its memory, so that it costs no cached prefix; at least `EMBEDDED_CONTEXT`."""
    length, memory = EMBEDDED_CONTEXT, cache_bytes(model.device)
    for longer in LENGTHS:
        dtype = cache_dtype(model.dtype, longer)
        if SPARE * max_running * slot_bytes(model.config, dtype, longer) <= memory:
            length = max(length, longer)
    return length


class SlotBatcher:
    """Serves one model in one thread.

    `submit`, `cancel` and `retire` are called in the event loop's thread; `swap`, `admit`,
    `run_between_passes` and `stop` block and are called in worker threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        exited: Callable[[str], None],
        routers: Routers | None = None,
        keep_cache: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`exited` is called, in some thread, when the serving thread ends without `stop`.
        `routers`: the model's, whose selections are returned with each turn. `keep_cache`: turns
        continue with keys and values of former weights; not with `deterministic`."""
        self._model = model
        self._keep_cache = keep_cache and not deterministic
        self._deterministic = deterministic
        self._routers = routers
        self._running = min(FIXED_RUNNING, max_running) if deterministic else max_running
        self._cache = self._make_cache(max_context)
        self._slots = SlotAllocator(self._cache)
        # Tokens of a pass: so many if it is deterministic, else at most so many.
        self._rows = self._running + READING_ROWS
        if not deterministic:
            self._rows = max(STEP_TOKENS, self._rows)
        self._adapted = AdaptedLayers(model, deterministic=deterministic)
        # Shapes of adapters that were probed.
        self._probed: set[tuple[tuple[str, int], ...]] = set()
        self._gate = PromptGate()
        self._exited = exited
        # Held by the one caller that has passes paused.
        self._pausing = threading.Lock()
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._inbox: deque[EngineTurn] = deque()
        self._retired: list[LiveVersion] = []
        self._ended: dict[int, tuple[asyncio.AbstractEventLoop, Ended]] = {}
        self._computing = False
        self._passes = 0
        self._pause_wanted = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="slot-batcher")

    def _make_cache(self, max_context: int) -> SlotCache:
        """The cache of keys and values; sets the model's attention to the one that reads it."""
        model = self._model
        model.set_attn_implementation(FIXED if self._deterministic else RAGGED)
        return (FixedCache if self._deterministic else RaggedCache)(
            model.config,
            model.dtype,
            running=self._running,
            max_context=max_context,
            device=model.device,
            routing=self._routers and self._routers.shape,
        )

    def start(self) -> None:
        """Start serving. Returns at once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the serving thread runs and takes turns."""
        return self._thread.is_alive() and not self._stopping

    def adapt(self, layers: Iterable[str]) -> None:
        """Have these layers of the model compute adapters. Before `start`."""
        self._adapted.cover(layers)

    def submit(self, turn: EngineTurn, live: LiveVersion, ended: Ended) -> None:
        """Serve `turn` with the weights `live`; `ended(turn, error)` is called in this event loop
        when it has ended."""
        turn.live = live
        with self._state:
            self._ended[id(turn)] = (asyncio.get_running_loop(), ended)
        if self._gate.enter(turn):
            self._add(turn)

    def cancel(self, turn: EngineTurn) -> None:
        """Stop computing `turn`; its `ended` is not called."""
        turn.closed = True
        with self._state:
            self._ended.pop(id(turn), None)
        self._open_gate(turn)

    def swap(self, change: Callable[[], None]) -> float:
        """Run `change`, which loads the model's own weights, between two passes.

        Keys and values of the old weights are discarded and recomputed, or serve the turns that
        have them to their end (`keep_cache`). Returns the seconds that serving stood still. Raises
        RuntimeError when the thread has ended or hangs, and `FailedPrecondition` (kind
        `not_deterministic`) if this machine does not compute rows independently of each other and
        the batcher is deterministic.
        """
        with self._paused():
            began = time.monotonic()
            change()
            self._forget(keep=self._keep_cache)
            if self._deterministic:
                self._probed.clear()
                self._probe(None)
            return time.monotonic() - began

    def admit(self, adapter: RowAdapter) -> float:
        """Prepare to serve `adapter`; returns the seconds that serving stood still: not at all,
        but for the first adapter of a shape in a deterministic batcher. Raises as `swap`."""
        if not self._deterministic or adapter.shape in self._probed:
            return 0.0
        with self._paused():
            began = time.monotonic()
            self._forget(keep=False)
            self._probe(adapter)
            self._probed.add(adapter.shape)
            return time.monotonic() - began

    def retire(self, live: LiveVersion) -> None:
        """Release the resources of `live`, which has no turns and gets no others."""
        with self._state:
            self._retired.append(live)

    def run_between_passes(
        self, call: Callable[[], T], adapter: RowAdapter | None = None, rows: int = 0
    ) -> T:
        """Run `call`, which only reads the model, between two passes; returns its result. It
        computes `rows` rows with `adapter`.

        Raises as `swap`.
        """
        with self._paused(), self._adapted.passing([RowSpan(rows, adapter)]):
            return call()

    def _forget(self, *, keep: bool) -> None:
        """Discard keys and values; running turns compute them again. Call it while paused, or in
        the thread that computes. `keep`: except for turns that have drawn tokens."""
        for turn in self._slots.forget(keep=keep):
            if not turn.versions:
                turn.read_tokens = 0
        if self._deterministic:
            self._cache.clear()

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Compute no pass meanwhile, for one caller at a time.

        Between two pauses one pass is computed, so that turns get on however many callers there
        are. Raises RuntimeError when the thread has ended or hangs.
        """
        if not self._pausing.acquire(timeout=PASS_SECONDS):
            raise RuntimeError("another call holds the model, and hangs")
        try:
            with self._state:
                self._pause_wanted = True
                idle = self._state.wait_for(lambda: not self._computing, PASS_SECONDS)
            try:
                if not idle or not self.alive:
                    raise RuntimeError("the serving thread has ended or hangs")
                yield
            finally:
                with self._state:
                    self._pause_wanted = False
                    self._state.notify_all()
                    self._state.wait_for(self._passed_since(self._passes), PASS_SECONDS)
        finally:
            self._pausing.release()

    def _passed_since(self, passes: int) -> Callable[[], bool]:
        """A predicate: a pass has begun since there were `passes`, or there is no work."""

        def passed() -> bool:
            work = self._inbox or self._slots.busy
            return self._passes != passes or not work or not self.alive

        return passed

    def stop(self, timeout: float) -> None:
        """End the serving thread. Turns in flight are dropped."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _add(self, *turns: EngineTurn) -> None:
        with self._state:
            self._inbox += turns
            self._state.notify_all()

    def _open_gate(self, turn: EngineTurn) -> None:
        if followers := [one for one in self._gate.opened(turn) if not one.closed]:
            self._add(*followers)

    def _run(self) -> None:
        try:
            while self._await_pass():
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

    def _await_pass(self) -> bool:
        """Wait until a pass is to be computed, and assign slots; False when stopping."""
        with self._state:
            while not self._stopping:
                if not self._pause_wanted and (self._inbox or self._slots.busy):
                    self._computing = True
                    self._passes += 1
                    self._state.notify_all()
                    turns = self._admitted()
                    break
                self._state.wait()
            else:
                return False
        self._slots.assign(turns)
        return True

    def _admitted(self) -> list[EngineTurn]:
        """Turns that get a slot now, first in first out, while there is memory for their tokens."""
        slots = self._slots
        slots.drop_closed()
        while self._retired:
            slots.forget_version(self._retired.pop())
        self._inbox.extendleft(reversed(slots.retract()))
        free = min(self._running, self._cache.count) - len(slots.busy)
        room = slots.room
        turns: list[EngineTurn] = []
        while len(turns) < free and self._inbox:
            turn = self._inbox[0]
            if not turn.closed:
                room -= counted(len(turn.prompt_ids) + len(turn.token_ids))
                if room < 0:
                    break
                turns.append(turn)
            self._inbox.popleft()
        return turns

    def _pass(self) -> None:
        """Compute one pass: a token per drawing turn, and what fits of the prompts."""
        drawing: list[tuple[int, int, KVSlot]] = []
        reading: list[tuple[int, int, KVSlot]] = []
        for slot in self._slots.busy.values():
            if (unread := slot.unread) == 1:
                # Neighbours in memory in succession: they are computed in place.
                drawing.append((padded(slot.read), slot.index, slot))
            elif unread:
                reading.append((slot.used_at, slot.index, slot))
        parts: list[tuple[KVSlot, int]] = []
        room = self._rows
        for _, _, slot in sorted(drawing) + sorted(reading):
            if not room:
                break
            count = min(room, slot.unread)
            parts.append((slot, count))
            room -= count
        if not parts:  # all of them were cancelled
            return
        rows, spans = self._placed(parts)
        runs: list[SlotRun] = []
        ids = [0] * (self._rows - room)
        last: list[tuple[KVSlot, int]] = []
        for (slot, count), row in zip(parts, rows, strict=True):
            runs.append(SlotRun(slot.index, slot.read, count, row))
            ids[row : row + count] = slot.ids[slot.read : slot.read + count]
            slot.read += count
            assert slot.turn is not None  # busy
            if not slot.turn.versions:
                slot.turn.read_tokens += count
            if slot.read == len(slot.ids):
                last.append((slot, row + count - 1))
        logits = self._forward(runs, ids, [row for _, row in last], spans)
        if last:
            self._record([slot for slot, _ in last], logits)

    def _placed(self, parts: list[tuple[KVSlot, int]]) -> tuple[list[int], list[RowSpan]]:
        """Return the first row of each part in the pass, and the adapters of the rows.

        Rows of one adapter are adjacent. The parts of a deterministic pass are sorted by it.
        """
        numbers: dict[LiveVersion | None, int] = {}
        for slot, _ in parts:
            numbers.setdefault(slot.live, len(numbers))
        if self._deterministic:
            parts.sort(key=lambda part: numbers[part[0].live])
        totals = [0] * len(numbers)
        for slot, count in parts:
            totals[numbers[slot.live]] += count
        spans = [
            RowSpan(total, None if live is None else live.adapter)
            for live, total in zip(numbers, totals, strict=True)
        ]
        free = [0, *itertools.accumulate(totals)]
        rows = []
        for slot, count in parts:
            number = numbers[slot.live]
            rows.append(free[number])
            free[number] += count
        return rows, spans

    def _record(self, slots: Sequence[KVSlot], logits: torch.Tensor) -> None:
        """Draw the next token of each slot from its row of `logits`."""
        turns = [slot.turn for slot in slots if slot.turn is not None]
        rows = [turn.next_draw() for turn in turns]
        if self._deterministic:
            drawn = _draw_each(logits, rows)
        else:
            drawn = list(zip(*draw(logits, rows), strict=True))
        ended: list[EngineTurn] = []
        finite = True
        for slot, turn, (token, logprob) in zip(slots, turns, drawn, strict=True):
            if turn.closed:
                continue
            assert slot.live is not None  # since `submit`
            turn.append(token, logprob, slot.live.version)
            slot.ids.append(token)
            broken = not math.isfinite(logprob)
            finite = finite and not broken
            if len(turn.versions) == 1:
                self._slots.index(slot)
                self._open_gate(turn)
            if broken or token in turn.stop_ids or turn.remaining <= 0:
                if self._cache.routes is not None:
                    turn.routes = self._cache.routes[slot.index, : slot.read].copy()
                self._slots.end(slot)
                ended.append(turn)
        if not finite:
            # Later turns would read NaN behind their own keys and values: what is masked is
            # multiplied by zero.
            self._forget(keep=False)
            self._cache.clear()
        for live, count in Counter(slot.live for slot in slots).items():
            assert live is not None  # since `submit`
            live.drew(count)
        self._report(ended)

    def _forward(
        self,
        runs: Sequence[SlotRun],
        ids: list[int],
        wanted: list[int],
        spans: Sequence[RowSpan] = (),
    ) -> torch.Tensor:
        """Logits of the `wanted` rows of a pass over `ids`, the tokens of `runs`, with the adapters
        of `spans`; in a deterministic batcher [running, vocabulary], the others being padding."""
        if self._deterministic:
            spare = self._rows - len(ids)
            ids = ids + [0] * spare
            wanted = wanted + [0] * (self._running - len(wanted))
            spans = [*spans, RowSpan(spare, None)]
        self._cache.plan(runs, len(ids))
        with self._adapted.passing(spans):
            if self._routers is None or self._cache.routes is None:
                return self._logits(ids, wanted)
            recorded = RecordedRoutes(self._routers.shape, {})
            with self._routers.passing(recorded):
                logits = self._logits(ids, wanted)
        routes = recorded.compact()
        for slot, first, count, row in runs:
            self._cache.routes[slot, first : first + count] = routes[row : row + count]
        return logits

    def _logits(self, ids: list[int], wanted: list[int]) -> torch.Tensor:
        """[len(wanted), vocabulary], as the cache is planned."""
        self._cache.to_device()
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([ids], device=self._cache.device),
                position_ids=self._cache.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self._cache.device),
                cache=self._cache,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _probe(self, adapter: RowAdapter | None) -> None:
        """Raise unless a token's logits are the same in every row, whatever the other rows are and
        whichever of them take `adapter`, too."""
        count = self._running
        singles = [SlotRun(slot, 0, 1, slot) for slot in range(count)]
        every = [RowSpan(count, adapter)]
        # NaN weights are reported by the first turn, whose log-probs are not finite.
        alike = self._forward(singles, [1] * count, list(range(count)), every).nan_to_num()
        same = torch.equal(alike, alike[:1].expand_as(alike))
        if count > 1:
            ids = [0, 1] * (READING_ROWS // 2) + [1, 0] * count
            rows = list(range(READING_ROWS, READING_ROWS + count - 1))
            runs = [SlotRun(0, 0, READING_ROWS, 0)]
            runs += [SlotRun(slot, 0, 1, READING_ROWS + slot - 1) for slot in range(1, count)]
            some = [RowSpan(READING_ROWS, None), RowSpan(count - 1, adapter)]
            mixed = self._forward(runs, ids[: len(rows) + READING_ROWS], rows, some).nan_to_num()
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

    def _report(self, turns: Sequence[EngineTurn]) -> None:
        """Notify each event loop of all its turns that have ended, at once."""
        notices: dict[asyncio.AbstractEventLoop, list[tuple[Ended, EngineTurn]]] = {}
        for turn in turns:
            self._open_gate(turn)
        with self._state:
            for turn in turns:
                if (waiting := self._ended.pop(id(turn), None)) is not None:
                    notices.setdefault(waiting[0], []).append((waiting[1], turn))
        for loop, some in notices.items():
            loop.call_soon_threadsafe(notify_ended, some)


def notify_ended(ended: Sequence[tuple[Ended, EngineTurn]]) -> None:
    """Call every `ended` for its turn, in order: `NOTIFY_GROUP` of them now, the others soon, so
    that the event loop does not stand still. Runs in the event loop."""
    for call, turn in ended[:NOTIFY_GROUP]:
        call(turn, None)
    if len(ended) > NOTIFY_GROUP:
        _notify_after(NOTIFY_ITERATIONS, ended[NOTIFY_GROUP:])


def _notify_after(iterations: int, ended: Sequence[tuple[Ended, EngineTurn]]) -> None:
    """`notify_ended` after so many iterations of the event loop."""
    loop = asyncio.get_running_loop()
    if iterations > 1:
        loop.call_soon(_notify_after, iterations - 1, ended)
    else:
        loop.call_soon(notify_ended, ended)


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
