"""What waits for a worker: by priority, then in fair turns by job, then in the order of a job."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from services.reward.call import FunctionCall
from services.reward.function import Lines, RegisteredFunction
from services.reward.quota import Budget
from troupe.scheduling.elastic import Action, SpeedUp
from troupe.scheduling.elastic.order import FairShares
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    import asyncio

    from services.reward.call import WorkerPlace
    from services.reward.dispatch import InvocationChunk

# The resources of a host: worker processes, and cores where they are handed out.
WORKERS, CORES = "workers", "cores"
# The name of the service's own host.
OWN_HOST = ""


@dataclass(eq=False)
class Waiting:
    """One invocation until its outcome. `rank` orders those of one job and priority
    (`troupe.scheduling.elastic.order`), equal ones by arrival."""

    invocation_id: str
    function: RegisteredFunction
    call: FunctionCall
    done: asyncio.Future[pb.InvokeResponse]
    since: float
    rank: tuple[float, int]
    priority: int = 0
    weight: float = 1.0
    # Its own, on the service's host; none: any that is free.
    place: WorkerPlace | None = None
    # With whom it runs, or will next; none: it waits.
    chunk: InvocationChunk | None = None
    host: str = ""
    # Cores that it was given, and what its job was charged for it.
    cores: int = 0
    charged: float = 0.0
    # When it began to run (0: not yet), and how often it did.
    began: float = 0.0
    attempts: int = 0
    cold_seconds: float = 0.0
    # What it printed, as far as somebody has asked.
    lines: Lines | None = None
    # What the scheduler sees, and what was known of the function's calls then.
    _seen: tuple[SpeedUp, bool, Action] | None = None

    @property
    def job(self) -> str:
        """On whose behalf: what fair turns are between."""
        return self.call.job_id

    @property
    def cost(self) -> float:
        """Worker-seconds, times cores, that it is expected to take."""
        return cost(self.function, self.call)

    def action(self, *, with_cores: bool) -> Action:
        """Itself as the scheduler sees it, with what is known of its function by now."""
        elastic, function = None, self.function
        seen = self._seen
        if seen is not None and seen[0] is function.curve and seen[1] == with_cores:
            return seen[2]
        needs = {WORKERS: 1, **function.needs}
        if with_cores and function.elastic:
            elastic = function.curve.elastic(
                CORES, function.levels, self.rank[1], lowest=self.call.estimated_seconds
            )
        elif with_cores:
            needs[CORES] = function.cores
        action = Action(
            self.invocation_id,
            self.since,
            needs,
            elastic,
            self.call.estimated_seconds or function.seconds,
            function=function.key,
            host=None if self.place is None else OWN_HOST,
        )
        self._seen = (function.curve, with_cores, action)
        return action


def cost(function: RegisteredFunction, call: FunctionCall) -> float:
    """Seconds, times cores, that `call` is expected to take with the fewest."""
    return (call.estimated_seconds or function.seconds) * max(1, function.cores)


# Those of one function, descending: the first in rank last, since it is taken from the end.
_Queue = list[Waiting]


class Queues:
    """Everything that waits."""

    def __init__(self) -> None:
        self.shares = FairShares()
        # By priority, job and function.
        self._levels: dict[int, dict[str, dict[str, _Queue]]] = {}
        # How many of each function.
        self._functions: dict[str, tuple[RegisteredFunction, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiting: Waiting) -> None:
        """Take it in at its place."""
        jobs = self._levels.setdefault(waiting.priority, {})
        if waiting.job not in jobs:
            self.shares.enter(waiting.job, waiting.weight)
        queue = jobs.setdefault(waiting.job, {}).setdefault(waiting.function.key, [])
        bisect.insort(queue, waiting, key=_backwards)
        self._count(waiting.function, 1)

    def remove(self, waiting: Waiting) -> None:
        """Take it out, wherever it is."""
        jobs = self._levels[waiting.priority]
        functions = jobs[waiting.job]
        queue = functions[waiting.function.key]
        place = bisect.bisect_left(queue, _backwards(waiting), key=_backwards)
        assert queue[place] is waiting
        del queue[place]
        if not queue:
            del functions[waiting.function.key]
            if not functions:
                del jobs[waiting.job]
                if not jobs:
                    del self._levels[waiting.priority]
        self._count(waiting.function, -1)

    def first(self, count: int, budget: Budget | None = None) -> list[Waiting]:
        """The first `count` in turn; of a function only as many as its limit leaves room for.

        What waits for nothing but its function's limit, or for units of a quota that `budget` has
        not, stands in nobody's way.
        """
        room: dict[str, int] = {}
        budget = budget or Budget({}, 0)
        found: list[Waiting] = []
        for priority in sorted(self._levels, reverse=True):
            jobs = {
                job: _startable(list(functions.values()), room, budget)
                for job, functions in self._levels[priority].items()
            }
            merged = self.shares.merge(jobs, lambda waiting: waiting.cost)
            found += islice(merged, count - len(found))
            if len(found) >= count:
                break
        return found

    def following(self, waiting: Waiting, count: int) -> list[Waiting]:
        """Up to `count` that come next of the same function, job and priority."""
        queue = (
            self._levels.get(waiting.priority, {})
            .get(waiting.job, {})
            .get(waiting.function.key, [])
        )
        return queue[: -count - 1 : -1] if count > 0 else []

    def seconds(self, cold_seconds: float) -> float:
        """The work that waits, of one worker; calls that need a new one cost its start, too."""
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


def _startable(queues: list[_Queue], room: dict[str, int], budget: Budget) -> Iterator[Waiting]:
    """Those of one job in rank; each takes of `room`, which is by function, when it is reached."""
    heads = [(queue[-1].rank, len(queue) - 1, queue) for queue in queues]
    heapq.heapify(heads)
    while heads:
        _, place, queue = heads[0]
        waiting = queue[place]
        function = waiting.function
        left = room.setdefault(function.key, function.room)
        if left <= 0 or (
            function.needs and not budget.admits(function.needs, min(left, place + 1))
        ):
            heapq.heappop(heads)
            continue
        room[function.key] = left - 1
        yield waiting
        if place:
            heapq.heapreplace(heads, (queue[place - 1].rank, place - 1, queue))
        else:
            heapq.heappop(heads)


def _backwards(waiting: Waiting) -> tuple[float, int]:
    rank, arrival = waiting.rank
    return -rank, -arrival
