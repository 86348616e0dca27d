"""How much work a trajectory still has, learned from those of its job that went before it.

Nobody knows how many actions a trajectory will ask for, but a job asks for thousands of alike ones.
Of every number of actions the share that ended there is counted, among all that came that far, also
those that have not ended yet (the actuarial estimate of Kaplan and Meier 1958: without these, the
short ones, which end first, would be taken for all). The action after which nothing follows, the
reward, is told by the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

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
