"""How much work a trajectory still has, learned from those of its job that went before it.

Nobody knows how many actions a trajectory will ask for, but a job asks for thousands of alike ones.
Of every number of actions the share that ended there is counted, among all that came that far, also
those that have not ended yet (the actuarial estimate of Kaplan and Meier 1958: without these, the
short ones, which end first, would be taken for all). The action after which nothing follows, the
reward, is told by the caller.
"""

from __future__ import annotations

from collections import OrderedDict
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
        # Mean work of an action, and of a last one: sums and counts.
        self._work = {False: (0.0, 0.0), True: (0.0, 0.0)}

    def asked(self, trajectory: str, work: float, *, last: bool) -> float:
        """What `trajectory` has left when it asks for an action of `work`, that one included.

        `last`: nothing is expected to follow; what follows all the same is a trajectory anew.
        """
        steps = self._steps.pop(trajectory, 0)
        self._decide(steps, ended=last)
        if last:
            return work
        self._steps[trajectory] = steps + 1
        if len(self._steps) > _TRAJECTORIES:
            self._steps.popitem(last=False)
        return work + self.further(steps + 1) * self._mean(False, work) + self._mean(True, 0.0)

    def ran(self, work: float, *, last: bool) -> None:
        """An action took so much."""
        total, count = self._work[last]
        self._work[last] = (total + work, count + 1.0)

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

    def _mean(self, last: bool, unknown: float) -> float:
        total, count = self._work[last]
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
            self._work = {key: (total / 2, count / 2) for key, (total, count) in self._work.items()}

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
