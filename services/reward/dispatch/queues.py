"""The queues of pending invocations: by priority, then fairly between jobs, then by rank."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from services.reward.dispatch.invocation import PendingInvocation
from services.reward.function import RegisteredFunction
from services.reward.quota import Budget
from troupe.scheduling.elastic.order import FairShares

# Invocations of one function in descending rank: the next one is at the end.
_Queue = list[PendingInvocation]


class Queues:
    """All invocations that wait for a worker."""

    def __init__(self) -> None:
        self.shares = FairShares()
        # Priority -> job -> function key -> queue.
        self._levels: dict[int, dict[str, dict[str, _Queue]]] = {}
        # Function key -> function and number of its queued invocations.
        self._functions: dict[str, tuple[RegisteredFunction, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, invocation: PendingInvocation) -> None:
        """Queue `invocation` by its priority, job and rank."""
        jobs = self._levels.setdefault(invocation.call.priority, {})
        if invocation.job not in jobs:
            self.shares.enter(invocation.job, invocation.call.weight)
        queue = jobs.setdefault(invocation.job, {}).setdefault(invocation.function.key, [])
        bisect.insort(queue, invocation, key=_descending)
        self._count(invocation.function, 1)

    def remove(self, invocation: PendingInvocation) -> None:
        """Take a queued invocation out."""
        jobs = self._levels[invocation.call.priority]
        functions = jobs[invocation.job]
        queue = functions[invocation.function.key]
        index = bisect.bisect_left(queue, _descending(invocation), key=_descending)
        assert queue[index] is invocation
        del queue[index]
        if not queue:
            del functions[invocation.function.key]
            if not functions:
                del jobs[invocation.job]
                if not jobs:
                    del self._levels[invocation.call.priority]
        self._count(invocation.function, -1)

    def first(
        self, count: int, budget: Budget, room_for: Callable[[RegisteredFunction], int]
    ) -> list[PendingInvocation]:
        """Return the next `count` invocations, of each function at most `room_for` it.

        One that waits only for that, or for units of a quota that `budget` lacks, does not hold up
        those behind it.
        """
        room = {key: room_for(function) for key, (function, _) in self._functions.items()}
        found: list[PendingInvocation] = []
        for priority in sorted(self._levels, reverse=True):
            jobs = {
                job: _startable(list(functions.values()), room, budget)
                for job, functions in self._levels[priority].items()
            }
            merged = self.shares.merge(jobs, lambda invocation: invocation.cost)
            found += islice(merged, count - len(found))
            if len(found) >= count:
                break
        return found

    def following(self, invocation: PendingInvocation, count: int) -> list[PendingInvocation]:
        """Return up to `count` queued invocations that are next of its function, job and
        priority."""
        queue = (
            self._levels.get(invocation.call.priority, {})
            .get(invocation.job, {})
            .get(invocation.function.key, [])
        )
        return queue[: -count - 1 : -1] if count > 0 else []

    def seconds(self, cold_seconds: float) -> float:
        """Return the seconds that one worker would need for all that is queued; calls that need a
        new process take `cold_seconds` more."""
        return sum(
            count * (function.seconds + (0.0 if function.stays_warm else cold_seconds))
            for function, count in self._functions.values()
        )

    def _count(self, function: RegisteredFunction, change: int) -> None:
        _, count = self._functions.get(function.key, (function, 0))
        if count + change:
            self._functions[function.key] = (function, count + change)
        else:
            del self._functions[function.key]
        function.queued += change
        self._size += change


def _startable(
    queues: list[_Queue], room: dict[str, int], budget: Budget
) -> Iterator[PendingInvocation]:
    """Yield the invocations of one job by rank; each takes one of `room` (by function) when
    reached."""
    heads = [(queue[-1].rank, len(queue) - 1, queue) for queue in queues]
    heapq.heapify(heads)
    while heads:
        _, index, queue = heads[0]
        invocation = queue[index]
        function = invocation.function
        left = room[function.key]
        if left <= 0 or (
            function.needs and not budget.admits(function.needs, min(left, index + 1))
        ):
            heapq.heappop(heads)
            continue
        room[function.key] = left - 1
        yield invocation
        if index:
            heapq.heapreplace(heads, (queue[index - 1].rank, index - 1, queue))
        else:
            heapq.heappop(heads)


def _descending(invocation: PendingInvocation) -> tuple[float, int]:
    rank, arrival = invocation.rank
    return -rank, -arrival
