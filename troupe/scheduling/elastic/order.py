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

import math
from collections import OrderedDict
from typing import Final, Literal, TypeAlias

from troupe.scheduling.elastic import waiters as waiting
from troupe.scheduling.elastic.durations import Durations, Kin
from troupe.scheduling.elastic.remaining import Remaining

Order: TypeAlias = Literal["shortest", "fcfs"]
FCFS: Final = "fcfs"
SHORTEST: Final = "shortest"
# Half of what a trajectory may take by default.
PATIENCE: Final = 300.0

# Jobs of which is remembered what they did; the longest unheard of are forgotten.
_JOBS: Final = 256
# Functions of which is remembered how long their calls take: up to 2.7 MB each.
_FUNCTIONS: Final = 64
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
    return since - waiting.head_start(waiters)
