"""Which turn is in which slot, and where tokens that a turn begins with are already."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.rollout.engines.slots import SlotCache
from services.rollout.engines.turns import Turn

# Tokens after which what a slot holds can be found.
_PAGE: Final = 8


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one turn. `ids[:read]` are the tokens whose keys and values it holds, also
    after the turn has ended: other turns may begin with them."""

    index: int
    turn: Turn | None = None
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
        self._slots = [Slot(index) for index in range(cache.count)]
        # The one that was used longest ago first.
        self._free: OrderedDict[int, Slot] = OrderedDict((s.index, s) for s in self._slots)
        self.busy: dict[int, Slot] = {}
        """Slots with a turn, by index."""
        # Slot by mark; what it holds may have changed since.
        self._by_mark: dict[int, int] = {}
        self._clock = 0

    def place(self, turns: Sequence[Turn]) -> None:
        """Give each turn a slot, with what is known already of the tokens it begins with."""
        # Targets by source and number of tokens. A source is busy, so it is nobody's target.
        copies: dict[tuple[int, int], list[int]] = {}
        for turn in turns:
            self._place(turn, copies)
        for (source, tokens), targets in copies.items():
            self._cache.copy(source, targets, tokens)

    def end(self, slot: Slot) -> None:
        """Its turn has ended; what the slot holds stays until the room is needed."""
        self.note(slot)
        slot.turn = None
        del self.busy[slot.index]
        self._free[slot.index] = slot

    def drop_closed(self) -> None:
        """Free the slots of turns that nobody waits for."""
        for slot in [s for s in self.busy.values() if s.turn is not None and s.turn.closed]:
            self.end(slot)

    def note(self, slot: Slot) -> None:
        """Let others find what the slot holds."""
        for at in range(len(slot.marks) * _PAGE, slot.read - _PAGE + 1, _PAGE):
            before = slot.marks[-1] if slot.marks else 0
            mark = hash((before, *slot.ids[at : at + _PAGE]))
            slot.marks.append(mark)
            self._by_mark[mark] = slot.index

    def forget(self) -> list[Turn]:
        """All keys and values are to be computed anew; turns that are in a slot."""
        self._by_mark.clear()
        for slot in self._slots:
            slot.read = 0
            slot.marks.clear()
        # None is worth more than another, and neighbours are computed where they are.
        self._free = OrderedDict(sorted(self._free.items()))
        return [slot.turn for slot in self.busy.values() if slot.turn is not None]

    def _place(self, turn: Turn, copies: dict[tuple[int, int], list[int]]) -> None:
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

    def _find(self, ids: list[int]) -> Slot | None:
        """The slot that holds the most pages of what `ids` begin with."""
        mark, found = 0, None
        for at in range(0, len(ids) - _PAGE, _PAGE):
            mark = hash((mark, *ids[at : at + _PAGE]))
            found = self._by_mark.get(mark, found)
        return None if found is None else self._slots[found]


def common(slot: Slot, ids: list[int]) -> int:
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
