"""In which order turns that no engine has room for go on.

A trainer waits for whole groups, so the turn whose group has the fewest trajectories left goes
first: finishing what is nearly finished makes samples soonest (shortest remaining work first). A
turn of a large group is passed over only so long: what it yields is counted in turns that were
served since it came, and each trajectory that its group has left is worth one filling of all
places. After that every newcomer stands behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Further trajectories do not make a turn wait longer.
MOST_LEFT: Final = 16


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """A turn that waits. `since`: turns that had been served when it came."""

    item: T
    group: str
    since: int
    number: int
    patience: int
    key: int = 0
    waits: bool = True


class TurnQueue(Generic[T]):
    """Turns by urgency. All operations cost O(log turns), `regroup` that per turn of the group."""

    def __init__(self, *, priority: bool = True) -> None:
        """Without `priority`: first come, first served."""
        self._priority = priority
        self._heap: list[tuple[int, int, Entry[T]]] = []
        self._groups: dict[str, set[Entry[T]]] = {}
        self._count = 0
        self._waiting = 0
        self.served = 0
        """Turns that left by `pop`: the clock of this queue."""

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[T]:
        """Those that wait, in no order."""
        return (entry.item for key, _, entry in self._heap if entry.waits and key == entry.key)

    def push(
        self,
        item: T,
        *,
        group: str = "",
        left: int = 0,
        places: int = 1,
        since: int | None = None,
    ) -> Entry[T]:
        """`item` waits. `left`: trajectories of its group that have not ended; `places`: turns that
        all engines may have at once; `since`: the clock when the turn first came, if it was served
        already and comes back."""
        self._count += 1
        entry = Entry(
            item,
            group,
            self.served if since is None else since,
            self._count,
            max(1, places),
        )
        entry.key = self._key(entry, left)
        self._waiting += 1
        if group and self._priority:
            self._groups.setdefault(group, set()).add(entry)
        self._put(entry)
        return entry

    def regroup(self, group: str, left: int) -> None:
        """Of `group` only `left` trajectories are left: its turns become more urgent, never
        less."""
        for entry in self._groups.get(group, ()):
            key = self._key(entry, left)
            if key < entry.key:
                entry.key = key
                self._put(entry)

    def peek(self) -> T | None:
        """The most urgent turn; None when nothing waits."""
        while self._heap:
            key, _, entry = self._heap[0]
            if entry.waits and key == entry.key:
                return entry.item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T:
        """Take the most urgent turn away: it is served. Raises `IndexError`."""
        item = self.peek()
        if item is None:
            raise IndexError("nothing waits")
        self._leave(self._heap[0][2])
        heapq.heappop(self._heap)
        self.served += 1
        return item

    def remove(self, entry: Entry[T]) -> None:
        """Somebody waits no more. Repeatable."""
        if entry.waits:
            self._leave(entry)
            if len(self._heap) > 2 * self._waiting + 64:
                self._heap = [(k, n, e) for k, n, e in self._heap if e.waits and k == e.key]
                heapq.heapify(self._heap)

    def _leave(self, entry: Entry[T]) -> None:
        entry.waits = False
        self._waiting -= 1
        members = self._groups.get(entry.group)
        if members is not None:
            members.discard(entry)
            if not members:
                del self._groups[entry.group]

    def _key(self, entry: Entry[T], left: int) -> int:
        return entry.since + (min(left, MOST_LEFT) * entry.patience if self._priority else 0)

    def _put(self, entry: Entry[T]) -> None:
        heapq.heappush(self._heap, (entry.key, entry.number, entry))
