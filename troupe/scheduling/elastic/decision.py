"""Elastic scheduling of single actions: which start now, and with how much of a resource.

ARL-Tangram (arXiv 2603.13019), section 3, minimises the sum of action completion times (waiting
plus running). Actions start in the order of the queue: what waits for a resource is not overtaken
by what would take any of its resources. Of those that could start, the last ones are held back
while the others gain more from their share than they and all behind them lose.

Where the paper is silent: its greedy loop stops at the first action that is better not held back,
ours considers all of the last `depth`, which costs one table for all of them. No action is held
back for units that would then idle. The first action of a resource always starts, so the system
never stalls.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Final, TypeAlias

import numpy as np

Amounts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Elastic:
    """The one resource of which an action can use more or less.

    `seconds[i]` is its duration with `levels[i]` units; levels ascend, seconds are positive.
    """

    resource: str
    levels: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.levels or len(self.levels) != len(self.seconds):
            raise ValueError(
                f"{self.resource}: {len(self.levels)} levels, {len(self.seconds)} times"
            )
        if self.levels[0] < 1 or sorted(set(self.levels)) != list(self.levels):
            raise ValueError(f"{self.resource}: levels {self.levels} do not ascend from 1 or more")
        if not min(self.seconds) > 0:
            raise ValueError(f"{self.resource}: not every time of {self.seconds} is positive")

    def within(self, units: int) -> int:
        """Return the index of the highest level of at most `units`; the lowest if there is none."""
        return max(0, bisect.bisect_right(self.levels, units) - 1)


@dataclass(frozen=True, slots=True)
class Action:
    """A waiting action. Times are seconds on the caller's clock.

    `needs`: fixed amounts, without the resource of `elastic`. `seconds`: its duration if nothing is
    elastic. `function`: what hosts are warm for; `host`: the only host where it can run (its
    sandbox with files is there); `place`: its sort key (`turn`), None for its arrival.
    """

    action_id: str
    since: float
    needs: Amounts = field(default_factory=dict)
    elastic: Elastic | None = None
    seconds: float = 1.0
    function: str = ""
    host: str | None = None
    place: float | None = None
    least: Amounts = field(init=False, repr=False, compare=False)
    """The least resources with which it can run."""
    kind: str = field(init=False, repr=False, compare=False)
    """Equal for actions that fit in the same places."""

    def __post_init__(self) -> None:
        vector = {resource: amount for resource, amount in self.needs.items() if amount}
        for resource, amount in vector.items():
            if amount < 0:
                raise ValueError(f"{resource}: {amount} is negative")
        if self.elastic is not None:
            if self.elastic.resource in self.needs:
                raise ValueError(f"{self.elastic.resource} is both fixed and elastic")
            vector[self.elastic.resource] = self.elastic.levels[0]
        object.__setattr__(self, "least", vector)
        object.__setattr__(self, "kind", repr((self.host, vector)))

    def on(self, resource: str) -> Elastic | None:
        """Return the action's use of `resource`, elastic or as one fixed level; None: none."""
        if self.elastic is not None and self.elastic.resource == resource:
            return self.elastic
        amount = self.least.get(resource, 0)
        if not amount:
            return None
        seconds = self.seconds if self.elastic is None else self.elastic.seconds[0]
        return Elastic(resource, (amount,), (seconds,))


@dataclass(frozen=True, slots=True)
class Running:
    """A running action: what it holds, and when it is expected to end."""

    holds: Amounts
    ends: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Start `action` now with the resources `holds`; it is expected to take `seconds`."""

    action: Action
    holds: Amounts
    seconds: float


def turn(action: Action) -> tuple[float, str]:
    """Sort key of a queue."""
    return action.since if action.place is None else action.place, action.action_id


def lacking(action: Action, capacity: Amounts) -> str | None:
    """Return the resource of which `capacity` is too small for `action`; None if it fits."""
    return next((r for r, need in action.least.items() if need > capacity.get(r, 0)), None)


Row: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Relative tolerance for rounding when gains are compared.
_ROUNDING: Final = 1e-9


def best_split(options: Sequence[Elastic], spare: int) -> Gains | AllocationTable:
    """Return the optimal levels of every prefix of a list of elastic actions. `spare` (units): the
    most that will be asked for. Raises ValueError when negative."""
    if spare < 0:
        raise ValueError(f"the actions need {-spare} units more than there are")
    by_option = {id(option): _gains(option, spare) for option in options}
    gains = [by_option[id(option)] for option in options]
    convex = [gain for gain in gains if gain is not None]
    return (
        Gains(options, convex) if len(convex) == len(options) else AllocationTable(options, spare)
    )


class Gains:
    """For convex curves without gaps, where each further unit gains less: units go wherever they
    gain most. `O(units log units)` for all actions together."""

    def __init__(self, options: Sequence[Elastic], gains: Sequence[Row]) -> None:
        """`gains[i][j]`: seconds that unit j above the lowest level saves for action i."""
        self._lowest = [option.levels[0] for option in options]
        self._slowest = [0.0, *accumulate(option.seconds[0] for option in options)]
        flat = np.concatenate([*gains, np.zeros(0)])
        # Of equal gains, the first action in the queue comes first.
        order = np.argsort(-flat, kind="stable")
        self._gains = flat[order]
        self._owners = np.repeat(np.arange(len(gains)), [len(gain) for gain in gains])[order]

    def seconds(self, count: int, spare: int) -> float:
        """Compute `AllocationTable.seconds`."""
        return self._slowest[count] - float(self._gains[self._largest(count, spare)].sum())

    def levels(self, count: int, spare: int) -> list[int]:
        """Compute `AllocationTable.levels`."""
        units = np.bincount(self._owners[self._largest(count, spare)], minlength=count)
        return [low + int(n) for low, n in zip(self._lowest[:count], units, strict=True)]

    def _largest(self, count: int, spare: int) -> Row:
        return np.flatnonzero(self._owners < count)[:spare]


class AllocationTable:
    """Dynamic programming over actions, one table row each (ARL-Tangram, section 3, the inner DP),
    in `O(actions x levels x spare)`. One pass serves all prefixes."""

    def __init__(self, options: Sequence[Elastic], spare: int) -> None:
        """`spare` (units): the most that will be asked for."""
        # rows[i][s]: least seconds of the first i actions with s spare units.
        self._rows: list[Row] = [np.zeros(spare + 1)]
        # choices[i][s]: units above its lowest level that action i gets then.
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
        """Return the least sum of durations of the first `count` actions with `spare` units."""
        return float(self._rows[count][spare])

    def levels(self, count: int, spare: int) -> list[int]:
        """Return the levels that achieve `seconds(count, spare)`, in the order of the actions."""
        chosen: list[int] = []
        for i in reversed(range(count)):
            extra = int(self._choices[i][spare])
            chosen.append(self._lowest[i] + extra)
            spare -= extra
        return chosen[::-1]


def _extras(option: Elastic, spare: int) -> tuple[Row, Row]:
    """Return the units above the lowest level, and seconds, of the levels that are faster than all
    below them."""
    extras, seconds = [0], [option.seconds[0]]
    for level, time in zip(option.levels, option.seconds, strict=True):
        if level - option.levels[0] <= spare and time < seconds[-1]:
            extras.append(level - option.levels[0])
            seconds.append(time)
    return np.array(extras), np.array(seconds)


def _gains(option: Elastic, spare: int) -> Row | None:
    """Return the seconds that each unit above the lowest level saves; None if a later unit saves
    more than an earlier one, or levels have gaps."""
    levels = option.levels[: spare + 1]
    if levels[-1] - levels[0] != len(levels) - 1:
        return None
    seconds = np.array(option.seconds[: len(levels)])
    gains: Row = seconds[:-1] - seconds[1:]
    if np.any(gains[1:] - gains[:-1] > _ROUNDING * seconds[0]):
        return None
    return gains[: int(np.searchsorted(-gains, 0.0))]


def waiting_seconds(
    waiting: Sequence[Elastic], free: int, releases: Iterable[tuple[float, int]], *, beyond: int = 0
) -> float:
    """Return the sum of the times, from now, at which `waiting` end, in seconds.

    A heap of completion times simulates the queue in its order (ARL-Tangram, section 3). Each
    action begins when its lowest level is free, with an even share of what is free then among all
    that still wait. (The paper does not say what its estimate gives them.) `free` units are
    available now, `releases` (seconds, units) later. `beyond` more actions wait behind `waiting`
    and end one after another at their pace. An action that never gets its units ends with the last
    release.
    """
    heap = list(releases)
    heapq.heapify(heap)
    now = total = 0.0
    left = len(waiting) + beyond
    latest = 0.0
    for option in waiting:
        while free < option.levels[0] and heap:
            now, units = heapq.heappop(heap)
            free += units
        index = option.within(max(option.levels[0], free // left))
        free -= option.levels[index]
        left -= 1
        end = now + option.seconds[index]
        heapq.heappush(heap, (end, option.levels[index]))
        total += end
        latest = max(latest, end)
    if waiting and beyond:
        pace = latest / len(waiting)
        total += beyond * latest + pace * beyond * (beyond + 1) / 2
    return total


# So many times the horizon of waiting actions are searched for ones that want a resource.
_SEEN: Final = 8


@dataclass(frozen=True, slots=True)
class DecisionBounds:
    """Bounds of one decision's work.

    `depth`: how many of the fitting actions may be held back. `horizon`: for how many waiting
    actions ends are estimated one by one. `cold_seconds`: extra time on a host where the function
    never ran (`hosts`).
    """

    depth: int = 8
    horizon: int = 32
    cold_seconds: float = 0.5

    def __post_init__(self) -> None:
        if self.depth < 0 or self.horizon < 1:
            raise ValueError(f"depth = {self.depth} < 0, or horizon = {self.horizon} < 1")
        if not self.cold_seconds >= 0:
            raise ValueError(f"cold_seconds = {self.cold_seconds} is negative")


def split(
    fitting: Sequence[Action],
    left: dict[str, int],
    running: Iterable[Running],
    waiting: Sequence[Action],
    now: float,
    rules: DecisionBounds,
) -> dict[str, int]:
    """Return the levels, by action id, of the elastic ones of `fitting` that start.

    `left`: units of one host when each of `fitting` has its lowest level; reduced to what remains.
    `waiting` are behind them.
    """
    levels: dict[str, int] = {}
    ends: list[Running] | None = None
    for resource in dict.fromkeys(a.elastic.resource for a in fitting if a.elastic is not None):
        members = [a for a in fitting if a.elastic is not None and a.elastic.resource == resource]
        ends = list(running) if ends is None else ends
        releases = [(max(0.0, r.ends - now), held) for r in ends if (held := r.holds.get(resource))]
        releases += [(a.seconds, a.needs[resource]) for a in fitting if a.needs.get(resource)]
        units = left[resource] + sum(a.least[resource] for a in members)
        chosen = _share(resource, members, units, releases, waiting, rules)
        left[resource] = units - sum(chosen.values())
        levels |= chosen
    for action in fitting:
        if action.elastic is not None and action.action_id not in levels:
            for other in left.keys() & action.needs.keys():
                left[other] += action.needs[other]
    return levels


def _share(
    resource: str,
    members: Sequence[Action],
    units: int,
    releases: list[tuple[float, int]],
    waiting: Sequence[Action],
    rules: DecisionBounds,
) -> dict[str, int]:
    """Return the levels, by action, of the members that start; `units` is what they have
    together."""
    options = [action.elastic for action in members if action.elastic is not None]
    lowest = [option.levels[0] for option in options]
    fewest = max(1, len(members) - rules.depth)
    split = best_split(options, units - sum(lowest[:fewest]))
    # The first waiting actions stand for all; most of them may not want the resource.
    ahead = islice(waiting, _SEEN * rules.horizon)
    behind = (option for a in ahead if (option := a.on(resource)) is not None)
    queued = list(islice(behind, rules.horizon))
    beyond = len(waiting) - rules.horizon if len(queued) == rules.horizon else 0
    best: tuple[float, int, list[int]] | None = None
    for count in range(len(members), fewest - 1, -1):
        spare = units - sum(lowest[:count])
        chosen = split.levels(count, spare)
        idle = units - sum(chosen)
        if count < len(members) and idle >= lowest[count]:
            continue  # held back without benefit to another action
        starting = list(zip(options[:count], chosen, strict=True))
        ends = [(o.seconds[o.within(level)], level) for o, level in starting]
        tail = [*options[count:], *queued]
        objective = split.seconds(count, spare) + waiting_seconds(
            tail, idle, [*releases, *ends], beyond=max(0, beyond)
        )
        # At equal objectives start it.
        if best is None or objective < best[0] * (1 - 1e-12):
            best = (objective, count, chosen)
    assert best is not None  # there is at least one member
    started = members[: best[1]]
    return {action.action_id: level for action, level in zip(started, best[2], strict=True)}


def grant(action: Action, level: int | None) -> Grant:
    """Grant `action` `level` units of its elastic resource."""
    holds, seconds = dict(action.needs), action.seconds
    if action.elastic is not None and level is not None:
        holds[action.elastic.resource] = level
        seconds = action.elastic.seconds[action.elastic.within(level)]
    return Grant(action, holds, seconds)
