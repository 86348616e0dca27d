"""Calls that one worker was given at once: short ones, so that none costs a round trip alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from services.reward.call import Place
from services.reward.queues import Waiting

# A worker is given as many calls as it is expected to do in this time, at most so many.
SECONDS: Final = 0.05
MOST: Final = 64
# Of arguments: they go to another host in one message, and no call should wait for the others'.
MOST_BYTES: Final = 4 << 20
# A call that takes longer than this keeps nobody behind it: they go elsewhere.
PATIENCE_SECONDS: Final = 0.2


def fitting(first: Waiting, others: list[Waiting]) -> list[Waiting]:
    """Those of `others`, in their order, that one message can hold along with `first`."""
    left = MOST_BYTES - len(first.call.arguments_json)
    for place, one in enumerate(others):
        left -= len(one.call.arguments_json)
        if left < 0:
            return others[:place]
    return others


class Chunk:
    """Invocations in the order in which a place runs them, until each has ended or left."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        place: Place,
        cancel: Callable[[], None],
        recall: Callable[[list[Waiting]], None],
    ) -> None:
        """`cancel` ends the one that runs; `recall` is told of those that waited for too long
        behind another."""
        self.place, self.cancel = place, cancel
        self.calls = [one.call for one in waiting]
        self._waiting: list[Waiting | None] = list(waiting)
        self._left = len(waiting)
        # Nothing before it is left.
        self._first = 0
        self._recall = recall
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    @property
    def behind(self) -> int:
        """How many have not begun."""
        return max(0, self._left - 1)

    @property
    def current(self) -> Waiting | None:
        """The one that runs, or is the next to."""
        while self._first < len(self._waiting):
            if (found := self._waiting[self._first]) is not None:
                return found
            self._first += 1
        return None

    def ended(self, index: int) -> Waiting | None:
        """The one whose outcome came, unless it left before."""
        found = self._remove(index)
        self._watch()
        return found

    def leave(self, waiting: Waiting) -> None:
        """Let go of one that has not begun, as far as anybody knows; if it runs after all, its
        outcome is nobody's."""
        self._remove(self._waiting.index(waiting))
        waiting.call.dropped = True

    def leave_all(self) -> list[Waiting]:
        """All that have no outcome, in their order; they leave."""
        found = [one for one in self._waiting if one is not None]
        self._waiting, self._left = [], 0
        self._unwatch()
        return found

    def _remove(self, index: int) -> Waiting | None:
        found, self._waiting[index] = self._waiting[index], None
        self._left -= found is not None
        return found

    def _watch(self) -> None:
        self._unwatch()
        if self.behind:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PATIENCE_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        current = self.current
        behind = [one for one in self._waiting if one is not None and one is not current]
        for one in behind:
            self.leave(one)
        self._recall(behind)
