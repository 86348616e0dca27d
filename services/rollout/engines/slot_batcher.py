"""Continuous batching over slots: one tensor row per turn, passes of any shape.

Turns join and leave between any two passes of the model; a pass draws a token for every turn whose
prompt has been read, and reads prompts with the rows that are left.
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
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from services.rollout.engines import paged_batcher
from services.rollout.engines.paged_batcher import PASS_SECONDS, STEP_TOKENS, Ended
from services.rollout.engines.requests import Draw
from services.rollout.engines.sampling import draw
from services.rollout.engines.slot_cache import (
    LENGTHS,
    MASKED,
    SPARE,
    KVSlot,
    SlotAllocator,
    SlotCache,
    SlotRun,
    cache_bytes,
    padded,
    slot_bytes,
)
from services.rollout.engines.turns import EngineTurn, PromptGate
from troupe.mixtures import RecordedRoutes, Routers
from troupe.scheduling.defaults import EMBEDDED_CONTEXT

log = logging.getLogger(__name__)
T = TypeVar("T")

NAME: Final = "troupe_slots"
# Up to so many keys a drawing turn attends by two products, which cost three quarters of the fused
# kernel at 20 keys; at 300 the kernel is the cheaper one.
_FEW_KEYS: Final = 64
# torch's softmax of shorter rows computes number by number: 1,024 rows of 15 take 282 microseconds,
# of 16 take 20. No slot is shorter.
_LEAST_KEYS: Final = 16
# Turns for which a pass attends in place in the time that it takes for one whose keys and values
# are copied before: slots between those of turns are computed too, where they are fewer.
_COPIED: Final = 2.25
# Numbers of keys and values read in the time that a further call of attention takes.
_CALL: Final = 65_536
# Turns whose end the event loop hears of at once, and its iterations before the next group: about
# what a trajectory takes from its last token to the store's next call.
NOTIFY_GROUP: Final = 64
NOTIFY_ITERATIONS: Final = 12
# Rows of a pass beyond one per turn, for prompts, if those are not read in larger parts.
_READING_ROWS: Final = 64


def fits_slots(model: PreTrainedModel, max_running: int, max_context: int) -> bool:
    """Whether `SlotBatcher` can serve `model`: plain causal attention, and memory for `max_running`
    turns at full length."""
    if not paged_batcher.supports(model.config) or max_context > LENGTHS[-1]:
        return False
    dtype = cache_dtype(model.dtype, max_context)
    return max_running * slot_bytes(model.config, dtype, max_context) <= cache_bytes(model.device)


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
    """Serves one model in one thread; its methods are called from the threads that
    `ContinuousBatcher` names."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        max_context: int,
        drew: Callable[[int], None],
        exited: Callable[[str], None],
        routers: Routers | None = None,
        keep_cache: bool = False,
    ) -> None:
        """`routers`: those of the model, whose selections are returned with each turn.
        `keep_cache`: turns go on with keys and values of former weights."""
        self._model = model
        self._keep_cache = keep_cache
        self._routers = routers
        self._running = max_running
        self._cache = self._make_cache(max_context)
        self._slots = SlotAllocator(self._cache)
        self._rows = max(STEP_TOKENS, self._running + _READING_ROWS)
        self._version = -1
        # Whether weights computed NaN: keys and values are cleared before the next ones are used.
        self._tainted = False
        self._gate = PromptGate()
        self._drew = drew
        self._exited = exited
        # Held by the one caller that has passes paused.
        self._pausing = threading.Lock()
        self._state = threading.Condition()
        # Guarded by `_state`.
        self._inbox: deque[EngineTurn] = deque()
        self._ended: dict[int, tuple[asyncio.AbstractEventLoop, Ended]] = {}
        self._computing = False
        self._passes = 0
        self._pause_wanted = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="slot-batcher")

    def _make_cache(self, max_context: int) -> SlotCache:
        """The cache of keys and values; sets the model's attention to the one that reads it."""
        model = self._model
        model.set_attn_implementation(NAME)
        return RaggedCache(
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

    def submit(self, turn: EngineTurn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it has ended."""
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

    def swap(self, change: Callable[[], None], version: int) -> float:
        """Run `change`, which loads weights, between two passes; later tokens carry `version`.

        Keys and values of the old weights are discarded and recomputed, or serve the turns that
        have them to their end (`keep_cache`). Returns the seconds that
        serving stood still. Raises RuntimeError when the thread has ended or hangs.
        """
        with self._paused():
            began = time.monotonic()
            change()
            self._version = version
            keep = self._keep_cache and not self._tainted
            if self._tainted:
                self._cache.clear()
                self._tainted = False
            for turn in self._slots.forget(keep=keep):
                if not turn.versions:
                    turn.read_tokens = 0
            self._weights_changed()
            return time.monotonic() - began

    def run_between_passes(self, call: Callable[[], T]) -> tuple[T, int]:
        """Run `call`, which only reads the model, between two passes; its result and the version.

        Raises as `swap`.
        """
        with self._paused():
            return call(), self._version

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

    def _weights_changed(self) -> None:
        """Called after new weights were loaded, while paused."""

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
        """Turns that get a slot now, first in first out."""
        self._slots.drop_closed()
        free = self._running - len(self._slots.busy)
        turns: list[EngineTurn] = []
        while len(turns) < free and self._inbox:
            turn = self._inbox.popleft()
            if not turn.closed:
                turns.append(turn)
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
        runs: list[SlotRun] = []
        ids: list[int] = []
        last: list[tuple[KVSlot, int]] = []
        room = self._rows
        for _, index, slot in sorted(drawing) + sorted(reading):
            tokens = slot.ids[slot.read : slot.read + room]
            if not tokens:
                break
            count = len(tokens)
            runs.append(SlotRun(index, slot.read, count))
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

    def _record(self, slots: Sequence[KVSlot], logits: torch.Tensor) -> None:
        """Draw the next token of each slot from its row of `logits`."""
        turns = [slot.turn for slot in slots if slot.turn is not None]
        drawn = self._draw(logits, [turn.next_draw() for turn in turns])
        ended: list[EngineTurn] = []
        for slot, turn, (token, logprob) in zip(slots, turns, drawn, strict=True):
            if turn.closed:
                continue
            turn.append(token, logprob, self._version)
            slot.ids.append(token)
            if not math.isfinite(logprob):
                self._tainted = True
            if len(turn.versions) == 1:
                self._slots.index(slot)
                self._open_gate(turn)
            if token in turn.stop_ids or turn.remaining <= 0:
                if self._cache.routes is not None:
                    turn.routes = self._cache.routes[slot.index, : slot.read].copy()
                self._slots.end(slot)
                ended.append(turn)
        self._drew(len(slots))
        self._report(ended)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Draw]) -> list[tuple[int, float]]:
        return list(zip(*draw(logits, rows), strict=True))

    def _forward(self, runs: Sequence[SlotRun], ids: list[int], wanted: list[int]) -> torch.Tensor:
        """Logits of the `wanted` rows of a pass over `ids`, the tokens of `runs`."""
        self._cache.plan(runs, len(ids))
        if self._routers is None or self._cache.routes is None:
            return self._logits(ids, wanted)
        recorded = RecordedRoutes(self._routers.shape, {})
        with self._routers.passing(recorded):
            logits = self._logits(ids, wanted)
        routes, start = recorded.compact(), 0
        for slot, first, count in runs:
            self._cache.routes[slot, first : first + count] = routes[start : start + count]
            start += count
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


@dataclass(frozen=True, slots=True)
class PaddedRuns:
    """b runs that are padded to each other, right-aligned, to Q queries and K keys.

    `rows`: their packed rows, which are consecutive. `gather` [b * Q]: the row of each query;
    `real`: indices of those that are no padding; both None where there is none. `slots`: the slots
    of their keys.
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

    def to(self, device: torch.device) -> PaddedRuns:
        """The same with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("gather", "real", "slots", "mask")
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        return replace(self, **moved)


class RaggedCache(SlotCache):
    """Slots whose passes are computed run by run, padded to runs of like length."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, *, max_context: int, **options: Any
    ) -> None:
        """`options`: those of `SlotCache`."""
        kept = cache_dtype(dtype, max_context)
        super().__init__(config, kept, max_context=max_context, **options)
        self.padded_runs: list[PaddedRuns] = []
        # [rows * kv_heads]: indices of the pass's keys in a layer's keys as [..., dim].
        self.key_rows = torch.empty(0, dtype=torch.long)

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """Plan a pass whose `size` rows are the tokens of `runs`, in order."""
        rows = [(slot, start + i) for slot, start, count in runs for i in range(count)]
        slots, positions = zip(*rows, strict=True)
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
            start = self.padded_runs[-1].rows.stop

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
        numbers, starts, lengths = zip(*runs, strict=True)
        counts = torch.tensor(lengths)
        ends = torch.tensor(starts) + counts
        b, q, k = len(runs), max(lengths), max(int(ends.max()), _LEAST_KEYS)
        first = min(numbers)
        span = max(numbers) + 1 - first
        beside = numbers == tuple(range(first, first + b))
        if q == 1 and not beside and span <= _COPIED * b:
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
        where = slice(first, first + b) if beside else torch.tensor(numbers)
        return PaddedRuns(b, q, k, rows, gather, real, where, mask)

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
        mask = torch.zeros(b, 1, 1, k, dtype=self.dtype)
        mask.masked_fill_((torch.arange(k) >= seen.unsqueeze(1)).view(b, 1, 1, k), MASKED)
        mask = mask.expand(b, 1, self.repeat, k)
        rows = slice(start, start + len(numbers))
        return PaddedRuns(b, 1, k, rows, gather, real, slots, mask)


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
