"""The queues of pending invocations: by priority, then fairly between jobs, then by rank."""

from __future__ import annotations

import asyncio
import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from services.reward.call import FunctionCall, WorkerSlot
from services.reward.function import LineSplitter, RegisteredFunction
from services.reward.quota import Budget
from troupe.scheduling.elastic import Action, SpeedUp
from troupe.scheduling.elastic.order import FairShares
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from services.reward.dispatch import InvocationChunk
    from services.reward.host import FunctionHost

# The resources of a host: worker processes, and cores where they are handed out.
WORKERS, CORES = "workers", "cores"
# The name of the service's own host.
OWN_HOST = ""


@dataclass(eq=False)
class PendingInvocation:
    """One invocation from its acceptance to its outcome.

    `rank` orders those of one job and priority (`troupe.scheduling.elastic.order`); those of equal
    rank run in the order of arrival.
    """

    invocation_id: str
    function: RegisteredFunction
    call: FunctionCall
    done: asyncio.Future[pb.InvokeResponse]
    since: float
    rank: tuple[float, int]
    # A slot of its own, on the service's host; None: any free worker will do.
    slot: WorkerSlot | None = None
    # The chunk with which it was given to a worker; None: it is queued.
    chunk: InvocationChunk | None = None
    host: str = ""
    # Cores that it was given, and what its job was charged for it.
    cores: int = 0
    charged: float = 0.0
    # When its current attempt began (0: queued), and how many attempts there were.
    began: float = 0.0
    attempts: int = 0
    cold_seconds: float = 0.0
    # Splits what it prints into lines; None until it prints.
    lines: LineSplitter | None = None
    # `action()` as it was computed last, with what it was computed from.
    _cached: tuple[SpeedUp, int, Action] | None = None

    @property
    def job(self) -> str:
        """The job that it is charged to: shares are fair between jobs."""
        return self.call.job_id

    @property
    def cost(self) -> float:
        """Worker-seconds, times cores, that it is expected to take."""
        return cost(self.function, self.call)

    def action(self, most_cores: int) -> Action:
        """The invocation as the scheduler sees it, by what is known of its function so far.

        `most_cores`: of the largest host that it may run on; 0: no host hands out cores.
        """
        function, cached = self.function, self._cached
        if cached is not None and cached[0] is function.curve and cached[1] == most_cores:
            return cached[2]
        elastic = None
        needs = {WORKERS: 1, **function.needs}
        if most_cores and function.elastic:
            first = function.exploring
            elastic = function.curve.elastic(
                CORES,
                function.levels,
                self.rank[1],
                lowest=self.call.estimated_seconds,
                most=most_cores,
                explore=first is None or first is self or first.done.done(),
            )
            if len(elastic.levels) < len(function.levels):
                function.exploring = self
        elif most_cores:
            needs[CORES] = function.cores
        action = Action(
            self.invocation_id,
            self.since,
            needs,
            elastic,
            self.call.estimated_seconds or function.seconds,
            function=function.key,
            host=None if self.slot is None else OWN_HOST,
        )
        self._cached = (function.curve, most_cores, action)
        return action


def cost(function: RegisteredFunction, call: FunctionCall) -> float:
    """Seconds, times cores, that `call` is expected to take with the fewest cores."""
    return (call.estimated_seconds or function.seconds) * max(1, function.cores)


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
        self, count: int, budget: Budget, hosts: Sequence[FunctionHost] = ()
    ) -> list[PendingInvocation]:
        """The next `count` invocations; of a function as many as its concurrency limit and the size
        of `hosts` allow.

        One that waits only for that, or for units of a quota that `budget` lacks, does not hold up
        those behind it.
        """
        room: dict[str, int] = {}
        for key, (function, _) in self._functions.items() if hosts else ():
            room[key] = min(function.room, sum(host.room(function) for host in hosts))
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
        """Up to `count` queued invocations that are next of its function, job and priority."""
        queue = (
            self._levels.get(invocation.call.priority, {})
            .get(invocation.job, {})
            .get(invocation.function.key, [])
        )
        return queue[: -count - 1 : -1] if count > 0 else []

    def seconds(self, cold_seconds: float) -> float:
        """Seconds that one worker would need for all that is queued; calls that need a new process
        take `cold_seconds` more."""
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
    """The invocations of one job by rank; each takes one of `room` (by function) when reached."""
    heads = [(queue[-1].rank, len(queue) - 1, queue) for queue in queues]
    heapq.heapify(heads)
    while heads:
        _, index, queue = heads[0]
        invocation = queue[index]
        function = invocation.function
        left = room.setdefault(function.key, function.room)
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
