"""Memory of keys and values in slots, one row of tensors per turn, and which turn has which slot.

Keys lie side by side, so that passes attend to them in place. On a CPU a slot takes memory only for
the tokens that it holds: there is a slot for every turn that may run, and where these do not all
fit at full length, turns wait, or give up their slots and are computed again. Slots of ended turns
serve as prefix cache.
"""

from __future__ import annotations

import math
import mmap
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig

from services.rollout.engines.embedded.adapters import LiveVersion
from services.rollout.engines.turns import EngineTurn
from troupe.mixtures import Indices, RoutingShape

# Keys that a query attends to are padded to one of these lengths, by its position.
LENGTHS: Final = (64, 128, 192, *(base << k for k in range(17) for base in (256, 384)))
# Memory of keys and values, including ended turns': others may begin with the same tokens.
CACHE_BYTES: Final = 512 << 20
# Fraction of a GPU's free memory that the keys and values of one engine take instead.
_GPU_SHARE: Final = 0.25
# Slots per turn that may run.
SPARE: Final = 4
# Turns at full length for which there is memory, however much they take.
LEAST_TURNS: Final = 4
# Memory of a slot is counted in multiples of so many tokens: a head's keys of those are a few pages
# of the operating system.
_COUNTED: Final = 64
# Slots from the first running turn's to the last one's, per running turn, that are not too many:
# beyond it turns are moved together (`SlotAllocator._compact`).
_LOOSE: Final = 1.125
# Tokens per page of the prefix index: prefixes are found in multiples of it.
_PAGE: Final = 8
_CPU: Final = torch.device("cpu")
# Added to masked scores. Finite: its exponential is exactly zero, and nothing becomes NaN.
MASKED: Final = -1e30


def cache_bytes(device: torch.device) -> int:
    """Memory of keys and values on `device`."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(CACHE_BYTES, int(free * _GPU_SHARE))


def padded(position: int) -> int:
    """Number of keys that a token at `position` (from 0) is computed with."""
    if position < LENGTHS[0]:  # most of them, and asked for each in every pass
        return LENGTHS[0]
    return LENGTHS[bisect_left(LENGTHS, position + 1)]


class SlotRun(NamedTuple):
    """Tokens at `start` .. `start + tokens - 1` of one slot, computed in one pass, in the rows of
    the pass from `row` on."""

    slot: int
    start: int
    tokens: int
    row: int


def slot_bytes(config: PretrainedConfig, dtype: torch.dtype, max_context: int) -> int:
    """Bytes of a slot of `max_context` tokens: keys and values of all layers."""
    layers = config.get_text_config().num_hidden_layers
    return int(2 * layers * math.prod(_shape(config, max_context)) * dtype.itemsize)


def _shape(config: PretrainedConfig, max_context: int) -> tuple[int, int, int]:
    """Shape of a slot in one layer: (key heads, tokens, dimensions of a head)."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return heads, padded(max_context - 1), dim


class SlotCache(ABC):
    """Keys and values in `count` slots, and one slot more that padding rows write to.

    `keys` and `values`: per layer [count + 1, kv_heads, length, dim]; on a CPU memory is committed
    where it is written first, for `room` tokens in all if the slots could hold more (`limited`).
    `slots`, `positions` [rows] describe the pass being computed. Subclasses plan passes and have an
    attention function that reads the plan. Plans are made on the CPU, which needs their numbers."""

    one_per_turn: ClassVar[bool] = False
    """Whether there is a slot for every turn that may run, whatever the memory."""

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        *,
        running: int,
        max_context: int,
        device: torch.device = _CPU,
        routing: RoutingShape | None = None,
    ) -> None:
        """Slots for `running` turns of `max_context` tokens, and more if `cache_bytes` allow. On a
        GPU, which commits all memory at once, there are fewer if `cache_bytes` do not allow so
        many. `routing`: also keep the experts that each token was sent to."""
        text = config.get_text_config()
        self.heads, length, dim = _shape(config, max_context)
        self.repeat: int = text.num_attention_heads // self.heads
        self.dtype = dtype
        self.device = device
        self._layers = text.num_hidden_layers
        slot = (self.heads, length, dim)
        self._slot_bytes = math.prod(slot) * dtype.itemsize
        memory, full = cache_bytes(device), slot_bytes(config, dtype, max_context)
        one_per_turn = self.one_per_turn or device.type == "cpu"
        least = running if one_per_turn else min(running, LEAST_TURNS)
        self.count = max(least, min(memory // full, SPARE * running))
        self.room = max(memory * length // full, LEAST_TURNS * length)
        self.limited = device.type == "cpu" and self.count * length > self.room
        # Tokens for which each slot has memory.
        self._committed: list[int] = []
        self._shape = (self.count + 1, *slot)
        # [slots, tokens, layers, k], in host memory that is committed where it is written first.
        self.routes: Indices | None = None
        if routing is not None:
            shape = (self.count + 1, length, routing.layers, routing.top_k)
            kind = routing.dtype
            pages = mmap.mmap(
                -1, math.prod(shape) * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            self.routes = np.frombuffer(pages, kind).reshape(shape)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._pages: list[mmap.mmap] = []
        self.slots = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)
        self.clear()

    @abstractmethod
    def plan(self, runs: Sequence[SlotRun], size: int) -> None:
        """Plan the next pass: of `size` rows, of which the first are the tokens of `runs`. Runs
        that are neighbours here are computed together where they are alike."""

    def to_device(self) -> None:
        """Move the plan to where the model is."""
        self.slots, self.positions = self.slots.to(self.device), self.positions.to(self.device)

    def clear(self) -> None:
        """Fill all slots with zeros: masked values are still multiplied, by zero."""
        self._pages.clear()
        self._committed = [0] * (self.count + 1)
        self.keys = [self._zeros() for _ in range(self._layers)]
        self.values = [self._zeros() for _ in range(self._layers)]

    def _zeros(self) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(self._shape, dtype=self.dtype, device=self.device)
        size = self._slot_bytes * (self.count + 1)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.append(pages)
        return torch.frombuffer(pages, dtype=self.dtype).view(self._shape)

    @property
    def committed(self) -> int:
        """Tokens for which slots have memory."""
        return sum(self._committed)

    def committed_of(self, slot: int) -> int:
        """Tokens for which `slot` has memory."""
        return self._committed[slot]

    def commit(self, slot: int, tokens: int) -> None:
        """Count memory for the first `tokens` of `slot`, which are about to be written."""
        self._committed[slot] = max(self._committed[slot], counted(tokens))

    def release(self, slot: int, kept: int = 0) -> None:
        """Return the memory of `slot` behind its first `kept` tokens to the operating system; whole
        pages hold zeros then."""
        kept = counted(kept)
        head_bytes = self._slot_bytes // self.heads
        for head in range(self.heads):
            first = slot * self._slot_bytes + head * head_bytes
            start = first + kept * head_bytes // self._shape[2]
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (first + head_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                for pages in self._pages:
                    pages.madvise(mmap.MADV_DONTNEED, start, stop - start)
        self._committed[slot] = kept

    def move(self, moves: Mapping[int, tuple[int, int]]) -> None:
        """Write to every slot of `moves`, all at once, what its (source, tokens) says: the first
        tokens of the source as they were before. Sources and targets may be the same slots."""
        by_length: dict[int, list[tuple[int, int, int]]] = {}
        for target, (source, tokens) in moves.items():
            by_length.setdefault(counted(tokens), []).append((source, target, tokens))
        parts = [tuple(zip(*some, strict=True)) for some in by_length.values()]
        indices = [(torch.tensor(s), torch.tensor(t), max(n)) for s, t, n in parts]
        for tensor in (*self.keys, *self.values):
            taken = [tensor[sources, :, :length] for sources, _, length in indices]
            for (_, targets, length), contents in zip(indices, taken, strict=True):
                tensor[targets, :, :length] = contents
        for _, t, n in parts:
            for slot in t:
                self.commit(slot, max(n))
        if self.routes is not None:
            experts = [self.routes[list(s), : max(n)] for s, _, n in parts]
            for (_, t, n), chosen in zip(parts, experts, strict=True):
                self.routes[list(t), : max(n)] = chosen


def counted(tokens: int) -> int:
    """`tokens`, as the memory that they take is counted."""
    return -(-tokens // _COUNTED) * _COUNTED


@dataclass(slots=True, eq=False)
class KVSlot:
    """The slot of one turn. It holds keys and values of `ids[:read]` by the weights `live`, also
    after the turn has ended: other turns of these may begin with the same tokens."""

    index: int
    turn: EngineTurn | None = None
    live: LiveVersion | None = None
    ids: list[int] = field(default_factory=list)
    read: int = 0
    used_at: int = 0
    # Prefix hashes by which it is found: of the weights, each page and all before it.
    page_hashes: list[int] = field(default_factory=list)
    # Its keys and values are partly of former weights: they serve this turn, and no other.
    of_former: bool = False

    @property
    def unread(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.ids) - self.read if self.turn is not None else 0


class SlotAllocator:
    """Gives turns slots of a cache. Used by the thread that computes, or while that is paused.

    Running turns lie side by side in memory, so that passes attend to their keys in place: a turn
    is moved once when it begins, or when the turns around it have ended, and what an ended turn
    left for others changes places with it."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._slots = [KVSlot(index) for index in range(cache.count)]
        # Least recently used first.
        self._free: OrderedDict[KVSlot, None] = OrderedDict.fromkeys(self._slots)
        self.busy: dict[int, KVSlot] = {}
        """Slots with a turn, by index."""
        # Slot by prefix hash; its contents may have changed since.
        self._by_hash: dict[int, KVSlot] = {}
        self._clock = 0

    def assign(self, turns: Sequence[EngineTurn]) -> None:
        """Give each turn a slot that holds the longest known prefix of its tokens, and keep all
        running turns side by side."""
        # (source, tokens) by target. Nothing is written before all are known.
        moves: dict[int, tuple[int, int]] = {}
        for turn in turns:
            self._assign(turn, moves)
        if self._cache.limited:
            self._make_room()
        self._compact(moves)
        if moves:
            self._cache.move(moves)
        if self._cache.limited:  # moved turns have memory at both places
            self._make_room()

    @property
    def room(self) -> float:
        """Tokens for which there is memory beyond what running turns need for those that they
        have."""
        if not self._cache.limited:
            return math.inf
        return self._cache.room - sum(counted(len(slot.ids)) for slot in self.busy.values())

    def retract(self) -> list[EngineTurn]:
        """Take the slots of the turns that began last, until the others have memory; returns these
        turns, in the order in which they began. One turn always has memory."""
        retracted: list[EngineTurn] = []
        while self.room < 0:
            last = max(self.busy.values(), key=lambda slot: slot.used_at)
            assert last.turn is not None  # busy
            if not last.turn.versions:
                last.turn.read_tokens = 0
            retracted.insert(0, last.turn)
            self.end(last)
        return retracted

    def _make_room(self) -> None:
        """Commit memory for the tokens of running turns, and release memory until this fits: what
        running turns do not need, then of free slots, first of those that nobody finds, then of
        the least recently used."""
        for slot in self.busy.values():
            self._cache.commit(slot.index, len(slot.ids))
        if self._cache.committed <= self._cache.room:
            return
        for slot in self.busy.values():
            if self._cache.committed_of(slot.index) > counted(len(slot.ids)):
                self._cache.release(slot.index, len(slot.ids))
        for slot in sorted(self._free, key=lambda slot: bool(slot.page_hashes)):
            if self._cache.committed <= self._cache.room:
                break
            if self._cache.committed_of(slot.index):
                self._unindex(slot, 0)
                slot.read = 0
                self._cache.release(slot.index)

    def _compact(self, moves: dict[int, tuple[int, int]]) -> None:
        """Let running turns that are far from the others change places with free slots."""
        indices = sorted(self.busy)
        room = _LOOSE * len(indices)
        if not indices or indices[-1] - indices[0] < room:
            return
        free = sorted(self._free, key=lambda slot: slot.index)
        for index, other in zip(reversed(indices), free, strict=False):
            if index < room:
                break
            slot = self.busy.pop(index)
            origin = _origin(slot, moves)
            slot.index, other.index = other.index, index
            self.busy[slot.index] = slot
            if not other.page_hashes:
                other.read = 0  # nobody finds it
            for target, source, tokens in (
                (slot.index, origin, slot.read),
                (index, slot.index, other.read),
            ):
                moves.pop(target, None)
                if tokens:
                    moves[target] = (source, tokens)

    def end(self, slot: KVSlot) -> None:
        """Free the slot of a turn that has ended; it stays findable until it is reused."""
        self.index(slot)
        if slot.of_former:
            slot.of_former, slot.read = False, 0
        slot.turn = None
        del self.busy[slot.index]
        self._free[slot] = None

    def drop_closed(self) -> None:
        """Free the slots of closed turns."""
        for slot in [s for s in self.busy.values() if s.turn is not None and s.turn.closed]:
            self.end(slot)

    def index(self, slot: KVSlot) -> None:
        """Enter the slot's contents into the prefix index."""
        if slot.of_former:
            return
        for at in range(len(slot.page_hashes) * _PAGE, slot.read - _PAGE + 1, _PAGE):
            before = slot.page_hashes[-1] if slot.page_hashes else slot.live
            page = hash((before, *slot.ids[at : at + _PAGE]))
            slot.page_hashes.append(page)
            self._by_hash[page] = slot

    def _unindex(self, slot: KVSlot, pages: int) -> None:
        """Remove what follows the first `pages` of the slot from the prefix index."""
        for page in slot.page_hashes[pages:]:
            if self._by_hash.get(page) is slot:
                del self._by_hash[page]
        del slot.page_hashes[pages:]

    def forget(self, *, keep: bool = False) -> list[EngineTurn]:
        """Discard all keys and values (with `keep`, except for turns that have drawn tokens);
        return the turns in slots."""
        self._by_hash.clear()
        for slot in self._slots:
            slot.page_hashes.clear()
            if keep and slot.turn is not None and slot.turn.versions:
                slot.of_former = True
            else:
                slot.read = 0
        # Free slots hold nothing now. Use the first ones again, which have memory since running
        # turns are moved to them, before others get memory, too.
        self._free = OrderedDict.fromkeys(sorted(self._free, key=lambda slot: slot.index))
        return [slot.turn for slot in self.busy.values() if slot.turn is not None]

    def forget_version(self, live: LiveVersion) -> None:
        """Let the slots that hold keys and values of `live` be reused first: it has no turns, and
        gets no others."""
        for slot in [slot for slot in self._free if slot.live is live]:
            self._unindex(slot, 0)
            slot.live, slot.read = None, 0
            self._free.move_to_end(slot, last=False)

    def _assign(self, turn: EngineTurn, moves: dict[int, tuple[int, int]]) -> None:
        """Give `turn` the free slot with its longest known prefix, or enter a copy into `moves`.

        The source of a copy is busy, so it is never a target."""
        ids = [*turn.prompt_ids, *turn.token_ids]
        source = self._find(ids, turn.live)
        known = 0 if source is None else common(source, ids)
        if source is not None and source.turn is None:
            target = source
            del self._free[source]
        else:
            target, _ = self._free.popitem(last=False)
            if source is not None and known:
                moves[target.index] = (_origin(source, moves), known)
        self._unindex(target, known // _PAGE)
        if target is not source:
            target.page_hashes.clear()
        self._clock += 1
        target.turn, target.live, target.used_at = turn, turn.live, self._clock
        target.ids, target.read = ids, known
        self.busy[target.index] = target
        turn.started_at = turn.started_at or time.monotonic()

    def _find(self, ids: list[int], live: LiveVersion | None) -> KVSlot | None:
        """The slot with the longest indexed prefix of `ids` by the weights `live`."""
        prefix: Hashable = live
        found: KVSlot | None = None
        for at in range(0, len(ids) - _PAGE, _PAGE):
            prefix = hash((prefix, *ids[at : at + _PAGE]))
            slot = self._by_hash.get(prefix)
            if slot is not None and slot.live is live:
                found = slot
        return found


def _origin(slot: KVSlot, moves: Mapping[int, tuple[int, int]]) -> int:
    """Where the contents of `slot` are before `moves` are made."""
    return moves.get(slot.index, (slot.index, 0))[0]


def common(slot: KVSlot, ids: list[int]) -> int:
    """Length of the longest common prefix of `ids` and the slot's tokens.

    Never all of `ids`: the last token has to be computed for its logits.
    """
    low, high = 0, min(slot.read, len(ids) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if slot.ids[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
