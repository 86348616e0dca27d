"""In what order actions of one job and priority are looked at.

`fcfs`: as they came, which is ARL-Tangram's order (arXiv 2603.13019, section 3). Its objective is
the sum of action completion times, though, and of those FCFS is a poor order.

`shortest`: least expected work first. Where all trajectories of a step begin together, the times
at which they end add up to what they think plus what their actions take, waits included: the sum
of completion times of actions is least when that of trajectories is. On one machine the least sum
has who serves what is shortest first, by the work that is left over the number that wait for it
(Smith 1956; with preemption Schrage 1968). So an action's place is by what its *trajectory* is
expected to have left, not by its own length: a short command of a trajectory that has hours before
it helps nobody to end.

Nobody starves: an action counts as having come later than it did, by at most `patience` seconds
however much is left, so that nothing which comes `patience` seconds after it passes it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, TypeAlias, TypeVar

from troupe.scheduling.elastic.durations import Durations, Kin


def head_start(waiters: int, *, doubling: float = 1.0, most: float = 10.0) -> float:
    """Seconds by which an action counts as having come earlier than it did.

    Each doubling of its waiters is worth `doubling` seconds, all together at most `most`: nobody
    is passed by what arrives more than `most` seconds later, so nobody starves.
    """
    return min(most, doubling * math.log2(max(1, waiters)))


def group_waiters(begun: int, left: int) -> int:
    """Trajectories that wait for an action of one of a group, of which `begun` have begun and
    `left` have not ended: a group is trained on as a whole, so those that have ended wait for the
    others, and all of them for the last."""
    return 1 + max(0, begun - max(1, left))


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


def workers_to_start(
    backlog_seconds: float, waited_seconds: float, alive: int, startable: int, cold_seconds: float
) -> int:
    """How many of `startable` workers to start now, beside the `alive` ones.

    `backlog_seconds` is the work of a single worker that waits or is left of what runs;
    `waited_seconds` how long the first has waited that has no worker; `cold_seconds` how long a
    worker takes to start.
    """
    if startable <= 0:
        return 0
    # Without any there is nobody to wait for.
    least = int(alive == 0 or waited_seconds >= cold_seconds)
    worth = math.floor(min(backlog_seconds / max(cold_seconds, 1e-9), alive + startable)) - alive
    return min(startable, max(least, worth))


# Trajectories of a job that are kept apart at once, and numbers of actions: those beyond share one.
_TRAJECTORIES: Final = 65_536
_STEPS: Final = 512
# The share that ended at a number of actions counts like so many trajectories of the average share
# more: few have come far.
_DOUBT: Final = 4.0
# After so many actions what was counted before counts half: policies learn to be longer.
_MEMORY: Final = 16_384
# The estimates are made anew when there is so much more to make them from.
_NEWS: Final = 1 / 16
# Functions whose share of a job's actions is counted; those beyond share one.
_FUNCTIONS: Final = 64


def _as_all(function: str) -> float:
    """Nothing is known of a query: its calls are as all others."""
    return 1.0


class Remaining:
    """Of one job. Work is in core-seconds."""

    def __init__(self) -> None:
        # Actions so far of each trajectory, without the last; the longest unheard of first.
        self._steps: OrderedDict[str, int] = OrderedDict()
        # By number of actions: trajectories of which is known how they went on, and that ended.
        self._decided = [0.0] * (_STEPS + 1)
        self._ended = [0.0] * (_STEPS + 1)
        self._news, self._total = 0.0, 0.0
        self._further: list[float] = []
        # Work of actions, and of last ones, by function: sums and counts.
        self._work: dict[bool, dict[str, tuple[float, float]]] = {False: {}, True: {}}

    def asked(
        self,
        trajectory: str,
        work: float,
        *,
        last: bool,
        beside: Callable[[str], float] = _as_all,
    ) -> float:
        """What `trajectory` has left when it asks for an action of `work`, that one included.

        `last`: nothing is expected to follow; what follows all the same is a trajectory anew.
        `beside`: how much longer calls of a function take for its query than for others.
        """
        steps = self._steps.pop(trajectory, 0)
        self._decide(steps, ended=last)
        if last:
            return work
        self._steps[trajectory] = steps + 1
        if len(self._steps) > _TRAJECTORIES:
            self._steps.popitem(last=False)
        each, end = self._mean(False, work, beside), self._mean(True, 0.0, beside)
        return work + self.further(steps + 1) * each + end

    def ran(self, work: float, *, last: bool, function: str = "") -> None:
        """An action took so much."""
        functions = self._work[last]
        if function not in functions and len(functions) >= _FUNCTIONS:
            function = ""
        total, count = functions.get(function, (0.0, 0.0))
        functions[function] = (total + work, count + 1.0)

    def closed(self, trajectory: str) -> None:
        """It asks for nothing more, be it that its last action was told or not."""
        steps = self._steps.pop(trajectory, None)
        if steps is not None:
            self._decide(steps, ended=True)

    def further(self, steps: int) -> float:
        """How many actions a trajectory that asked for so many is expected to ask for besides,
        without the last."""
        if self._news > _NEWS * self._total or not self._further:
            self._estimate()
        return self._further[min(steps, len(self._further) - 1)]

    def _mean(self, last: bool, unknown: float, beside: Callable[[str], float]) -> float:
        functions = self._work[last]
        count = sum(count for _, count in functions.values())
        total = sum(total * beside(function) for function, (total, _) in functions.items())
        return total / count if count else unknown

    def _decide(self, steps: int, *, ended: bool) -> None:
        place = min(steps, _STEPS)
        self._decided[place] += 1.0
        self._ended[place] += ended
        self._news += 1.0
        self._total += 1.0
        if self._total > _MEMORY:
            self._total /= 2
            self._decided = [count / 2 for count in self._decided]
            self._ended = [count / 2 for count in self._ended]
            self._work = {
                last: {name: (total / 2, count / 2) for name, (total, count) in functions.items()}
                for last, functions in self._work.items()
            }

    def _estimate(self) -> None:
        self._news = 0.0
        decided, ended = sum(self._decided[1:]), sum(self._ended[1:])
        # One end more and two decisions more than there were (Laplace): never sure.
        average = (ended + 1.0) / (decided + 2.0)
        longest = max((k for k in range(_STEPS + 1) if self._decided[k]), default=0)
        # Beyond what was seen, the average share ends each time.
        following = (1.0 - average) / average
        further = [following]
        for k in range(longest, -1, -1):
            share = (self._ended[k] + _DOUBT * average) / (self._decided[k] + _DOUBT)
            following = (1.0 - share) * (1.0 + following)
            further.append(following)
        self._further = further[::-1]


Order: TypeAlias = Literal["shortest", "fcfs"]
FCFS: Final = "fcfs"
SHORTEST: Final = "shortest"
# Half of what a trajectory may take by default.
PATIENCE: Final = 300.0

# Jobs of which is remembered what they did; the longest unheard of are forgotten.
_JOBS: Final = 256
# Functions of which is remembered how long their calls take: up to 2.7 MB each.
# What is typical follows the last so many actions of a job.
_TYPICAL: Final = 256.0


def later(work: float, waiters: int = 1, *, typical: float, patience: float = PATIENCE) -> float:
    """Seconds by which an action counts as having come later than it did: 0 .. `patience`.

    `work` is what is left behind it for whoever waits, in core-seconds, shared by `waiters`;
    `typical` is halfway. It rises with work over waiters, so that what came together is in the
    order of that ratio, whatever is typical.
    """
    ratio = work / max(1, waiters)
    return patience * ratio / (ratio + typical) if ratio > 0 else 0.0


class Discipline:
    """Gives actions their places, and learns from what they took. No clock: `now` is the caller's.

    Places of one job and priority may be compared; between jobs turns are fair (`fair`).
    """

    def __init__(self, order: Order = SHORTEST, *, patience: float = PATIENCE) -> None:
        """Raises ValueError."""
        if order not in (FCFS, SHORTEST):
            raise ValueError(f"order = {order} is neither {FCFS} nor {SHORTEST}")
        if not (patience > 0 and math.isfinite(patience)):
            raise ValueError(f"patience = {patience} is not a positive number of seconds")
        self.order, self._patience = order, patience
        # With what is typical of a job: work over waiters.
        self._jobs: OrderedDict[str, tuple[Remaining, float]] = OrderedDict()
        # By function: seconds of all calls, and of those whose seconds were declared (True) by
        # what was declared of each.
        self._durations: OrderedDict[tuple[str, bool], Durations] = OrderedDict()

    def expected(self, function: str, kin: Kin, seconds: float, *, declared: float = 0.0) -> float:
        """Seconds that a call takes that is like `kin`, where calls of `function` take `seconds` on
        average; `declared` is what was said of this one, 0: nothing was."""
        known = self._durations.get((function, declared > 0))
        if known is None:
            return declared or seconds
        return known.factor(kin) * (declared * known.scale() if declared else seconds)

    def took(self, function: str, kin: Kin, seconds: float, *, declared: float = 0.0) -> None:
        """A call took so many seconds, where `declared` were expected."""
        self._durations_of(function, declared=False).observed(seconds, kin)
        if declared:
            durations = self._durations_of(function, declared=True)
            durations.observed(seconds / declared, kin, declared=declared)

    def _durations_of(self, function: str, *, declared: bool) -> Durations:
        key = (function, declared)
        known = self._durations.setdefault(key, Durations())
        self._durations.move_to_end(key)
        if len(self._durations) > _FUNCTIONS:
            self._durations.popitem(last=False)
        return known

    def place(
        self,
        now: float,
        job: str,
        trajectory: str,
        work: float,
        waiters: int = 1,
        *,
        last: bool = False,
        query: str = "",
    ) -> float:
        """Sorts the action that `trajectory` asks for now; least first.

        `work`: core-seconds that the action itself is expected to take. `last`: its trajectory
        needs nothing after it. One without a trajectory has nothing behind it either. What
        trajectories of `query` took before says what this one will take.
        """
        if self.order == FCFS:
            return first_come(now, waiters)
        remaining, typical = self._of(job)
        left = work
        if trajectory:
            kin = Kin(query)

            def beside(function: str) -> float:
                return self.expected(function, kin, 1.0) if query else 1.0

            left = remaining.asked(trajectory, work, last=last, beside=beside)
        if not math.isfinite(left):
            # As late as can be; nothing is learned of it, or no place could be told any more.
            return now + self._patience
        ratio = left / max(1, waiters)
        # The first is as typical as can be.
        typical = ratio if not typical else typical + (ratio - typical) / _TYPICAL
        self._jobs[job] = (remaining, typical)
        return now + later(left, waiters, typical=typical, patience=self._patience)

    def ran(
        self,
        job: str,
        trajectory: str,
        core_seconds: float,
        *,
        last: bool = False,
        function: str = "",
    ) -> None:
        """An action, a call of `function`, took so much."""
        if self.order != FCFS and trajectory:
            self._of(job)[0].ran(core_seconds, last=last, function=function)

    def closed(self, job: str, trajectory: str) -> None:
        """`trajectory` has ended."""
        if job in self._jobs:
            self._jobs[job][0].closed(trajectory)

    def _of(self, job: str) -> tuple[Remaining, float]:
        found = self._jobs.setdefault(job, (Remaining(), 0.0))
        self._jobs.move_to_end(job)
        if len(self._jobs) > _JOBS:
            self._jobs.popitem(last=False)
        return found


def first_come(since: float, waiters: int = 1) -> float:
    """Sorts actions by when they came, earlier the more trajectories wait (`waiters`)."""
    return since - head_start(waiters)
