"""The best split of one elastic resource among actions that start together.

For every prefix of a list of actions: the least sum of their durations with what is left over when
each has its lowest level, the *spare* units. Dropping the last action is what is asked for again
and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from troupe.scheduling.elastic.actions import Elastic

Row: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Gains that grow by no more than this part of a duration grow by rounding.
_ROUNDING: Final = 1e-9


class Split(Protocol):
    """What every prefix gets. Answers are exact."""

    def seconds(self, count: int, spare: int) -> float:
        """Least sum of durations of the first `count` actions with `spare` units."""

    def levels(self, count: int, spare: int) -> list[int]:
        """The levels that take `seconds(count, spare)`, in the order of the actions."""


def best_split(options: Sequence[Elastic], spare: int) -> Split:
    """By gains where that is exact, else by the table. `spare` (units) is the most that will be
    asked for. Raises ValueError when negative."""
    if spare < 0:
        raise ValueError(f"the actions need {-spare} units more than there are")
    by_option = {id(option): _gains(option, spare) for option in options}
    gains = [by_option[id(option)] for option in options]
    convex = [gain for gain in gains if gain is not None]
    return Gains(options, convex) if len(convex) == len(options) else Table(options, spare)


class Gains:
    """Where each further unit gains less than the one before, and levels have no gaps: the units
    go wherever they gain most. `O(units log units)` for all actions together."""

    def __init__(self, options: Sequence[Elastic], gains: Sequence[Row]) -> None:
        """`gains[i][j]`: seconds that unit j above the lowest level saves action i."""
        self._lowest = [option.levels[0] for option in options]
        self._slowest = [0.0, *accumulate(option.seconds[0] for option in options)]
        flat = np.concatenate([*gains, np.zeros(0)])
        # Of equal ones, those of the first in the queue first.
        order = np.argsort(-flat, kind="stable")
        self._gains = flat[order]
        self._owners = np.repeat(np.arange(len(gains)), [len(gain) for gain in gains])[order]

    def seconds(self, count: int, spare: int) -> float:
        """See `Split`."""
        return self._slowest[count] - float(self._gains[self._largest(count, spare)].sum())

    def levels(self, count: int, spare: int) -> list[int]:
        """See `Split`."""
        units = np.bincount(self._owners[self._largest(count, spare)], minlength=count)
        return [low + int(n) for low, n in zip(self._lowest[:count], units, strict=True)]

    def _largest(self, count: int, spare: int) -> Row:
        return np.flatnonzero(self._owners < count)[:spare]


class Table:
    """Dynamic programming over actions, one table row each (ARL-Tangram, section 3, the inner DP),
    in `O(actions x levels x spare)`. One pass serves all prefixes."""

    def __init__(self, options: Sequence[Elastic], spare: int) -> None:
        """`spare` (units) is the most that will be asked for."""
        # rows[i][s]: least seconds of the first i actions with s spare units.
        self._rows: list[Row] = [np.zeros(spare + 1)]
        # choices[i][s]: the units above its lowest level that action i has then.
        self._choices: list[Row] = []
        self._lowest = [option.levels[0] for option in options]
        places = np.arange(spare + 1)
        known = {id(option): _extras(option, spare) for option in options}
        for option in options:
            extras, seconds = known[id(option)]
            origin = places[None, :] - extras[:, None]
            totals = self._rows[-1][np.maximum(origin, 0)] + seconds[:, None]
            totals[origin < 0] = np.inf
            best = totals.argmin(axis=0)
            self._rows.append(totals[best, places])
            self._choices.append(extras[best])

    def seconds(self, count: int, spare: int) -> float:
        """See `Split`."""
        return float(self._rows[count][spare])

    def levels(self, count: int, spare: int) -> list[int]:
        """See `Split`."""
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


def _gains(option: Elastic, spare: int) -> Row | None:
    """Seconds that each unit above the lowest level saves; None where a later one saves more than
    one before it, or where levels have gaps."""
    levels = option.levels[: spare + 1]
    if levels[-1] - levels[0] != len(levels) - 1:
        return None
    seconds = np.array(option.seconds[: len(levels)])
    gains: Row = seconds[:-1] - seconds[1:]
    if np.any(gains[1:] - gains[:-1] > _ROUNDING * seconds[0]):
        return None
    return gains[: int(np.searchsorted(-gains, 0.0))]
