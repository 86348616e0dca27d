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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from services.rollout.engines import continuous
from services.rollout.engines.continuous import PASS_SECONDS, STEP_TOKENS, Ended
from services.rollout.engines.front import EngineTurn
from services.rollout.engines.gate import PromptGate
from services.rollout.engines.sampling import Draw, draw
from services.rollout.engines.slots import (
    CACHE_BYTES,
    LENGTHS,
    MASKED,
    SlotCache,
    SlotRun,
    padded,
    slot_bytes,
)

# Tokens after which what a slot holds can be found.
_PAGE: Final = 8


@dataclass(slots=True, eq=False)
class KVSlot:
    """A place for one turn. `ids[:read]` are the tokens whose keys and values it holds, also
    after the turn has ended: other turns may begin with them."""

    index: int
    turn: EngineTurn | None = None
    ids: list[int] = field(default_factory=list)
    read: int = 0
    used_at: int = 0
    # Of the pages that it can be found by: each of its page and all before it.
    marks: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens to read before the next one can be drawn."""
        return len(self.ids) - self.read if self.turn is not None else 0


class Shelves:
    """All slots of a cache. Belongs to the thread that computes, or to who holds it up."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._slots = [KVSlot(index) for index in range(cache.count)]
        # The one that was used longest ago first.
        self._free: OrderedDict[int, KVSlot] = OrderedDict((s.index, s) for s in self._slots)
        self.busy: dict[int, KVSlot] = {}
        """Slots with a turn, by index."""
        # Slot by mark; what it holds may have changed since.
        self._by_mark: dict[int, int] = {}
        self._clock = 0

    def place(self, turns: Sequence[EngineTurn]) -> None:
        """Give each turn a slot, with what is known already of the tokens it begins with."""
        # Targets by source and number of tokens. A source is busy, so it is nobody's target.
        copies: dict[tuple[int, int], list[int]] = {}
        for turn in turns:
            self._place(turn, copies)
        for (source, tokens), targets in copies.items():
            self._cache.copy(source, targets, tokens)

    def end(self, slot: KVSlot) -> None:
        """Its turn has ended; what the slot holds stays until the room is needed."""
        self.note(slot)
        slot.turn = None
        del self.busy[slot.index]
        self._free[slot.index] = slot

    def drop_closed(self) -> None:
        """Free the slots of turns that nobody waits for."""
        for slot in [s for s in self.busy.values() if s.turn is not None and s.turn.closed]:
            self.end(slot)

    def note(self, slot: KVSlot) -> None:
        """Let others find what the slot holds."""
        for at in range(len(slot.marks) * _PAGE, slot.read - _PAGE + 1, _PAGE):
            before = slot.marks[-1] if slot.marks else 0
            mark = hash((before, *slot.ids[at : at + _PAGE]))
            slot.marks.append(mark)
            self._by_mark[mark] = slot.index

    def forget(self) -> list[EngineTurn]:
        """All keys and values are to be computed anew; turns that are in a slot."""
        self._by_mark.clear()
        for slot in self._slots:
            slot.read = 0
            slot.marks.clear()
        # None is worth more than another, and neighbours are computed where they are.
        self._free = OrderedDict(sorted(self._free.items()))
        return [slot.turn for slot in self.busy.values() if slot.turn is not None]

    def _place(self, turn: EngineTurn, copies: dict[tuple[int, int], list[int]]) -> None:
        """Put `turn` where the most of its tokens are, or have them copied from there."""
        ids = turn.prompt_ids + turn.token_ids
        source = self._find(ids)
        known = 0 if source is None else common(source, ids)
        if source is not None and source.turn is None:
            target = source
            del self._free[source.index]
        else:
            _, target = self._free.popitem(last=False)
            if source is not None and known:
                copies.setdefault((source.index, known), []).append(target.index)
        for mark in target.marks[known // _PAGE :]:
            if self._by_mark.get(mark) == target.index:
                del self._by_mark[mark]
        if target is source:
            del target.marks[known // _PAGE :]
        else:
            target.marks.clear()
        self._clock += 1
        target.turn, target.ids, target.read, target.used_at = turn, ids, known, self._clock
        self.busy[target.index] = target
        turn.started_at = turn.started_at or time.monotonic()

    def _find(self, ids: list[int]) -> KVSlot | None:
        """The slot that holds the most pages of what `ids` begin with."""
        mark, found = 0, None
        for at in range(0, len(ids) - _PAGE, _PAGE):
            mark = hash((mark, *ids[at : at + _PAGE]))
            found = self._by_mark.get(mark, found)
        return None if found is None else self._slots[found]


def common(slot: KVSlot, ids: list[int]) -> int:
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
class PaddedRuns:
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
        self.members: list[PaddedRuns] = []
        # [rows * kv_heads]: where the pass's keys go, in a layer's keys as [..., dim].
        self.places = torch.empty(0, dtype=torch.long)

    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
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

    def _members(self, runs: Sequence[SlotRun], start: int) -> PaddedRuns:
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
        return PaddedRuns(b, q, k, rows, gather, real, where, mask)

    def _covering(
        self, slots: slice, numbers: Sequence[int], ends: torch.Tensor, start: int, k: int
    ) -> PaddedRuns:
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
        return PaddedRuns(b, 1, k, rows, gather, real, slots, mask)


def kept_as(dtype: torch.dtype, max_context: int) -> torch.dtype:
    """Type of the keys and values of a model of `dtype`.

    Half precision would lose the scores' digits between two products, and the fused kernel takes
    twice as long as them: float32 where all turns attend by products. Longer contexts are read
    faster in half precision, and need the memory.
    """
    few = padded(max_context - 1) <= _FEW_KEYS
    return torch.promote_types(dtype, torch.float32) if few else dtype


def _alike(run: SlotRun) -> tuple[int, int]:
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

GROUP: Final = 64
# Of the event loop, between two groups: about what a trajectory takes from its last token to the
# store's next call.
STEPS: Final = 12


def tell(ended: Sequence[tuple[Ended, EngineTurn]]) -> None:
    """Call every `ended` for its turn, in their order: the first `GROUP` now, others soon."""
    for call, turn in ended[:GROUP]:
        call(turn, None)
    if len(ended) > GROUP:
        _after(STEPS, ended[GROUP:])


def _after(steps: int, ended: Sequence[tuple[Ended, EngineTurn]]) -> None:
    """`tell` in `steps` steps of the running loop."""
    loop = asyncio.get_running_loop()
    if steps > 1:
        loop.call_soon(_after, steps - 1, ended)
    else:
        loop.call_soon(tell, ended)


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
        self._inbox: deque[EngineTurn] = deque()
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

    def submit(self, turn: EngineTurn, ended: Ended) -> None:
        """Serve `turn`; `ended(turn, error)` is called in this event loop when it is over."""
        with self._state:
            self._ended[id(turn)] = (asyncio.get_running_loop(), ended)
        if self._gate.enter(turn):
            self._add(turn)

    def resubmit(self, turn: EngineTurn, ended: Ended) -> None:
        """As `submit`; nothing calls it, since `swap` keeps its turns."""
        self.submit(turn, ended)

    def cancel(self, turn: EngineTurn) -> None:
        """Stop working on `turn`; its `ended` is not called."""
        turn.closed = True
        with self._state:
            self._ended.pop(id(turn), None)
        self._open_gate(turn)

    def swap(self, change: Callable[[], None], version: int) -> tuple[float, list[EngineTurn]]:
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

    def _add(self, *turns: EngineTurn) -> None:
        with self._state:
            self._inbox += turns
            self._state.notify_all()

    def _open_gate(self, turn: EngineTurn) -> None:
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

    def _admitted(self) -> list[EngineTurn]:
        """Turns that get a slot now, first come first served."""
        self._shelves.drop_closed()
        free = self._running - len(self._shelves.busy)
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
        for slot in self._shelves.busy.values():
            if (left := slot.left) == 1:
                # Neighbours in memory one after the other: they are computed where they are.
                drawing.append((padded(slot.read), slot.index, slot))
            elif left:
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
        over: list[EngineTurn] = []
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

    def _forward(self, runs: Sequence[SlotRun], ids: list[int], wanted: list[int]) -> torch.Tensor:
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

    def _report(self, turns: Sequence[EngineTurn]) -> None:
        """These have ended: their loop hears of all of them at once."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Ended, EngineTurn]]] = {}
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
    if not continuous.supports(model.config) or max_context > LENGTHS[-1]:
        return False
    kept = kept_as(model.dtype, max_context)
    return max_running * slot_bytes(model.config, kept, max_context) <= CACHE_BYTES
