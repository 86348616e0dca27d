"""The order in which actions of one job and priority are considered.

`fcfs`: by arrival, which is ARL-Tangram's order (arXiv 2603.13019, section 3). Its objective,
though, is the sum of action completion times, for which FCFS is a poor order.

`shortest`: least expected remaining work first. Where all trajectories of a step begin together,
the sum of completion times of actions is least when the sum for trajectories is. On one machine the
least sum results from serving the least work divided by the number of trajectories that wait for it
(Smith 1956; with preemption Schrage 1968). So the key is what the action's *trajectory* is expected
to have left, not the action's own length: a short command of a trajectory with hours left helps
none to end.

No action starves: its key is its arrival plus at most `patience` seconds, however much is left, so
that an action which arrives `patience` seconds later cannot pass it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, TypeAlias, TypeVar

from troupe.scheduling.elastic.durations import Durations, Kin


def head_start(waiters: int) -> float:
    """Return the seconds by which an action's arrival is moved forward for its waiters.

    One second per doubling of the waiters, at most ten: an action that arrives more than ten
    seconds later cannot pass, so none starves.
    """
    return min(10.0, math.log2(max(1, waiters)))


def group_waiters(begun: int, left: int) -> int:
    """Return the trajectories that wait for an action of one of a group, of which `begun` have
    begun and `left` have not ended. A group is trained as a whole, so ended ones wait for the
    others, and all for the last."""
    return 1 + max(0, begun - max(1, left))


T = TypeVar("T")

# Sharers beyond this number are forgotten while they have nothing waiting.
_REMEMBERED = 1024


class FairShares:
    """Weighted fair queueing between sharers: while two of them wait, what they got by weight
    differs by at most one action of each."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        # Mark of the sharer that was served last: newcomers start from it.
        self._now = 0.0

    def enter(self, name: str, weight: float = 1.0) -> None:
        """Note that `name` waits again, with `weight` from now on. Raises ValueError."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{name}: weight = {weight} is not a positive number")
        self._marks[name] = max(self._marks.get(name, self._now), self._now)
        self._weights[name] = weight
        if len(self._marks) > _REMEMBERED:
            # A mark that is not ahead of the others carries no information.
            past = [key for key, mark in self._marks.items() if mark <= self._now and key != name]
            for key in past:
                del self._marks[key]
                self._weights.pop(key, None)

    def charge(self, name: str, cost: float) -> None:
        """Begin an action of `name` that costs `cost`."""
        mark = self._marks.get(name, self._now)
        self._now = max(self._now, mark)
        self._marks[name] = mark + cost / self._weights.get(name, 1.0)

    def correct(self, name: str, difference: float) -> None:
        """Charge `name` `difference` more for an action (negative: less)."""
        if name in self._marks:
            self._marks[name] += difference / self._weights.get(name, 1.0)

    def merge(self, queues: Mapping[str, Iterator[T]], cost: Callable[[T], float]) -> Iterator[T]:
        """Yield the waiting items of all queues in the order in which they will be served."""
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
    """Return how many of `startable` workers to start now, in addition to the `alive` ones.

    `backlog_seconds`: waiting and running work in seconds of one worker; `waited_seconds`: how long
    the first call without a worker has waited; `cold_seconds`: start time of a worker.
    """
    if startable <= 0:
        return 0
    # The first worker starts at once.
    least = int(alive == 0 or waited_seconds >= cold_seconds)
    worth = math.floor(min(backlog_seconds / max(cold_seconds, 1e-9), alive + startable)) - alive
    return min(startable, max(least, worth))


# Numbers of trajectories and of actions that are distinguished; those beyond share one.
_TRAJECTORIES: Final = 65_536
_STEPS: Final = 512
# Prior: the share that ended at a number of actions counts like so many trajectories of the average
# share more, since few have come far.
_DOUBT: Final = 4.0
# After so many actions earlier counts are halved: policies learn to be longer.
_MEMORY: Final = 16_384
# Estimates are renewed when there is this fraction of new data.
_NEWS: Final = 1 / 16
# Functions whose work is counted separately; those beyond share one entry.
_FUNCTIONS: Final = 64


class Remaining:
    """Estimates of the remaining work of one job's trajectories, in core-seconds."""

    def __init__(self) -> None:
        # Actions so far of each trajectory, without the last; least recently seen first.
        self._steps: OrderedDict[str, int] = OrderedDict()
        # By number of actions: trajectories whose continuation is known, and how many of them
        # ended.
        self._decided = [0.0] * (_STEPS + 1)
        self._ended = [0.0] * (_STEPS + 1)
        self._news, self._total = 0.0, 0.0
        self._further: list[float] = []
        # Work of last (True) and other (False) actions by function: sums and counts.
        self._work: dict[bool, dict[str, tuple[float, float]]] = {False: {}, True: {}}

    def asked(
        self,
        trajectory: str,
        work: float,
        *,
        last: bool,
        relative: Callable[[str], float] = lambda function: 1.0,
    ) -> float:
        """Return the work that `trajectory` has left when it requests an action of `work`,
        including that action.

        `last`: no further action is expected; a later one starts the count anew.
        `relative(function)`: expected duration of the query's calls of a function relative to
        others'.
        """
        steps = self._steps.pop(trajectory, 0)
        self._decide(steps, ended=last)
        if last:
            return work
        self._steps[trajectory] = steps + 1
        if len(self._steps) > _TRAJECTORIES:
            self._steps.popitem(last=False)
        each, end = self._mean(False, work, relative), self._mean(True, 0.0, relative)
        return work + self.further(steps + 1) * each + end

    def ran(self, work: float, *, last: bool, function: str = "") -> None:
        """Record the work of an action."""
        functions = self._work[last]
        if function not in functions and len(functions) >= _FUNCTIONS:
            function = ""
        total, count = functions.get(function, (0.0, 0.0))
        functions[function] = (total + work, count + 1.0)

    def closed(self, trajectory: str) -> None:
        """End the trajectory, whether or not its last action was announced."""
        steps = self._steps.pop(trajectory, None)
        if steps is not None:
            self._decide(steps, ended=True)

    def further(self, steps: int) -> float:
        """Return the expected number of further actions, without the last, of a trajectory that has
        requested `steps`."""
        if self._news > _NEWS * self._total or not self._further:
            self._estimate()
        return self._further[min(steps, len(self._further) - 1)]

    def _mean(self, last: bool, unknown: float, relative: Callable[[str], float]) -> float:
        functions = self._work[last]
        count = sum(count for _, count in functions.values())
        total = sum(total * relative(function) for function, (total, _) in functions.items())
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
        # One more end and two more decisions than were seen (Laplace): never certain.
        average = (ended + 1.0) / (decided + 2.0)
        longest = max((k for k in range(_STEPS + 1) if self._decided[k]), default=0)
        # Beyond the longest seen, the average share ends each time.
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
# Half of a trajectory's default time limit.
PATIENCE: Final = 300.0

# Jobs that are remembered; the least recently seen are forgotten.
_JOBS: Final = 256
# The typical ratio follows about so many actions of a job.
_TYPICAL: Final = 256.0


def later(work: float, waiters: int = 1, *, typical: float, patience: float = PATIENCE) -> float:
    """Seconds, in 0 .. `patience`, that are added to an action's arrival.

    `work`: core-seconds left behind it, shared by `waiters`; at `typical` work it is half of
    `patience`. Rises with work over waiters, so actions that came together are ordered by that
    ratio.
    """
    ratio = work / max(1, waiters)
    return patience * ratio / (ratio + typical) if ratio > 0 else 0.0


class Discipline:
    """The assignment of actions to places in the queue, which learns from their durations. No
    clock: `now` is the caller's.

    Places are comparable within one job and priority; between jobs `FairShares` decides.
    """

    def __init__(self, order: Order = SHORTEST, *, patience: float = PATIENCE) -> None:
        """Raises ValueError."""
        if order not in (FCFS, SHORTEST):
            raise ValueError(f"order = {order} is neither {FCFS} nor {SHORTEST}")
        if not (patience > 0 and math.isfinite(patience)):
            raise ValueError(f"patience = {patience} is not a positive number of seconds")
        self.order, self._patience = order, patience
        # With the job's typical ratio of work to waiters.
        self._jobs: OrderedDict[str, tuple[Remaining, float]] = OrderedDict()
        # By function: seconds of all calls (False), and ratios to declared seconds (True).
        self._durations: OrderedDict[tuple[str, bool], Durations] = OrderedDict()

    def expected(self, function: str, kin: Kin, seconds: float, *, declared: float = 0.0) -> float:
        """Return the expected seconds of a call related to `kin`, where calls of `function` take
        `seconds` on average; `declared`: the caller's estimate for this one, 0 for none."""
        known = self._durations.get((function, declared > 0))
        if known is None:
            return declared or seconds
        return known.factor(kin) * (declared * known.scale() if declared else seconds)

    def took(self, function: str, kin: Kin, seconds: float, *, declared: float = 0.0) -> None:
        """Record that a call took `seconds`, where `declared` were estimated."""
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
        """Sort key of the action that `trajectory` requests now; least first.

        `work`: expected core-seconds of the action itself. `last`: its trajectory needs nothing
        after it; so does an action without a trajectory. Earlier trajectories of `query` inform the
        estimate.
        """
        if self.order == FCFS:
            return first_come(now, waiters)
        remaining, typical = self._of(job)
        left = work
        if trajectory:
            kin = Kin(query)

            def relative(function: str) -> float:
                return self.expected(function, kin, 1.0) if query else 1.0

            left = remaining.asked(trajectory, work, last=last, relative=relative)
        if not math.isfinite(left):
            # As late as possible; and nothing is learned of it, or no place could be computed any
            # more.
            return now + self._patience
        ratio = left / max(1, waiters)
        # The first action is typical by definition.
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
        """Record the core-seconds of an action, a call of `function`."""
        if self.order != FCFS and trajectory:
            self._of(job)[0].ran(core_seconds, last=last, function=function)

    def closed(self, job: str, trajectory: str) -> None:
        """Note that `trajectory` has ended."""
        if job in self._jobs:
            self._jobs[job][0].closed(trajectory)

    def _of(self, job: str) -> tuple[Remaining, float]:
        found = self._jobs.setdefault(job, (Remaining(), 0.0))
        self._jobs.move_to_end(job)
        if len(self._jobs) > _JOBS:
            self._jobs.popitem(last=False)
        return found


def first_come(since: float, waiters: int = 1) -> float:
    """Sort key by arrival, moved forward by `head_start` for the waiters."""
    return since - head_start(waiters)
