"""The best split of one elastic resource among actions that start together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from troupe.scheduling.elastic.actions import Elastic

Row: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Split:
    """For every prefix of a list of actions, the least sum of their durations with what is left
    over when each has its lowest level: the *spare* units.

    Dynamic programming over actions, one table row each (ARL-Tangram, section 3, the inner DP), in
    `O(actions x levels x spare)`. One pass serves all prefixes: dropping the last action is what
    is asked for again and again.
    """

    def __init__(self, options: Sequence[Elastic], spare: int) -> None:
        """`spare` (units) is the most that will be asked for. Raises ValueError when negative."""
        if spare < 0:
            raise ValueError(f"the actions need {-spare} units more than there are")
        # rows[i][s]: least seconds of the first i actions with s spare units.
        self._rows: list[Row] = [np.zeros(spare + 1)]
        # choices[i][s]: the units above its lowest level that action i has then.
        self._choices: list[Row] = []
        self._lowest = [option.levels[0] for option in options]
        places = np.arange(spare + 1)
        known: dict[Elastic, tuple[Row, Row]] = {}
        for option in options:
            if option not in known:
                known[option] = _extras(option, spare)
            extras, seconds = known[option]
            origin = places[None, :] - extras[:, None]
            totals = self._rows[-1][np.maximum(origin, 0)] + seconds[:, None]
            totals[origin < 0] = np.inf
            best = totals.argmin(axis=0)
            self._rows.append(totals[best, places])
            self._choices.append(extras[best])

    def seconds(self, count: int, spare: int) -> float:
        """Least sum of durations of the first `count` actions with `spare` units."""
        return float(self._rows[count][spare])

    def levels(self, count: int, spare: int) -> list[int]:
        """The levels that take `seconds(count, spare)`, in the order of the actions."""
        chosen: list[int] = []
        for i in reversed(range(count)):
            extra = int(self._choices[i][spare])
            chosen.append(self._lowest[i] + extra)
            spare -= extra
        return chosen[::-1]


def _extras(option: Elastic, spare: int) -> tuple[Row, Row]:
    """Units above the lowest level, and seconds: of levels that are faster than all below them."""
    extras, seconds = [0], [option.seconds[0]]
    for level, time in zip(option.levels, option.seconds, strict=True):
        if level - option.levels[0] <= spare and time < seconds[-1]:
            extras.append(level - option.levels[0])
            seconds.append(time)
    return np.array(extras), np.array(seconds)
