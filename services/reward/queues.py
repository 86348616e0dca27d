"""What waits for a worker: a queue per function, and who is first among them."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from services.reward.registry import Function
from troupe.scheduling.elastic import Action, Elastic
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    import asyncio

    from services.reward.slot import Slot

# The resources of a host: worker processes, and cores where they are handed out.
WORKERS, CORES = "workers", "cores"


@dataclass(order=True)
class Waiting:
    """One invocation until its outcome; ordered by priority, then by arrival."""

    rank: tuple[int, int]
    invocation_id: str = field(compare=False)
    function: Function = field(compare=False)
    arguments_json: str = field(compare=False)
    done: asyncio.Future[pb.InvokeResponse] = field(compare=False)
    since: float = field(compare=False)
    slot: Slot | None = field(default=None, compare=False)
    # Cores that it was given.
    cores: int = field(default=0, compare=False)

    def action(self, *, with_cores: bool) -> Action:
        """Itself as the scheduler sees it, with what is known of its function by now."""
        needs, elastic, function = {WORKERS: 1}, None, self.function
        if with_cores and function.elastic:
            levels = function.curve.offered(function.levels)
            elastic = Elastic(CORES, levels, function.curve.seconds(levels))
        elif with_cores:
            needs[CORES] = function.cores
        seconds = function.curve.seconds((max(1, function.cores),))[0]
        return Action(self.invocation_id, self.since, needs, elastic, seconds)


class Queues:
    """Everything that waits, by function."""

    def __init__(self) -> None:
        # Ascending, the first in rank last: it is taken from the end.
        self._queues: dict[str, list[Waiting]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiting: Waiting) -> None:
        """Take it in at its place."""
        queue = self._queues.setdefault(waiting.function.key, [])
        bisect.insort(queue, waiting, key=_backwards)
        waiting.function.queued += 1
        self._size += 1

    def remove(self, waiting: Waiting) -> None:
        """Take it out, wherever it is."""
        key = waiting.function.key
        queue = self._queues[key]
        place = bisect.bisect_left(queue, _backwards(waiting), key=_backwards)
        assert queue[place] is waiting
        del queue[place]
        if not queue:
            del self._queues[key]
        waiting.function.queued -= 1
        self._size -= 1

    def first(self, count: int) -> list[Waiting]:
        """The first `count` in rank; of a function only as many as its limit leaves room for.

        What waits for nothing but its function's limit stands in nobody's way.
        """
        return list(islice(heapq.merge(*map(_startable, self._queues.values())), count))


def _startable(queue: list[Waiting]) -> Iterator[Waiting]:
    return islice(reversed(queue), queue[0].function.room)


def _backwards(waiting: Waiting) -> tuple[int, int]:
    priority, arrival = waiting.rank
    return -priority, -arrival
