"""Who is next among those who share workers: each gets its share of the time, nobody starves.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a sharer's *mark* grows by cost / weight with
each action that is begun for it, and the lowest mark is next. One that comes back after a pause
starts at the mark of whoever was served last, so a pause saves nothing up. Pure: costs are the
caller's, in seconds of a worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

# Marks of sharers that are away are forgotten beyond so many.
_REMEMBERED = 1024


class FairShares:
    """The marks of all sharers. While two of them wait, what they were given by weight differs by
    no more than one action of each."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        # The mark of whoever was served last: those who come start from it.
        self._now = 0.0

    def enter(self, name: str, weight: float = 1.0) -> None:
        """`name` waits for something again, with `weight` from now on. Raises ValueError."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{name}: weight = {weight} is not a positive number")
        self._marks[name] = max(self._marks.get(name, self._now), self._now)
        self._weights[name] = weight
        if len(self._marks) > _REMEMBERED:
            # What is not ahead of the others has nothing to remember.
            past = [key for key, mark in self._marks.items() if mark <= self._now and key != name]
            for key in past:
                del self._marks[key]
                self._weights.pop(key, None)

    def charge(self, name: str, cost: float) -> None:
        """An action of `name` begins that takes `cost`."""
        mark = self._marks.get(name, self._now)
        self._now = max(self._now, mark)
        self._marks[name] = mark + cost / self._weights.get(name, 1.0)

    def correct(self, name: str, difference: float) -> None:
        """An action of `name` took so much more than was charged (or less, negative)."""
        if name in self._marks:
            self._marks[name] += difference / self._weights.get(name, 1.0)

    def merge(self, queues: Mapping[str, Iterator[T]], cost: Callable[[T], float]) -> Iterator[T]:
        """What waits, in the order in which it will be served, as if each were charged."""
        heap = [(self._marks.get(name, self._now), name) for name in queues]
        heapq.heapify(heap)
        while heap:
            mark, name = heap[0]
            following = next(queues[name], None)
            if following is None:
                heapq.heappop(heap)
                continue
            yield following
            heapq.heapreplace(heap, (mark + cost(following) / self._weights.get(name, 1.0), name))
