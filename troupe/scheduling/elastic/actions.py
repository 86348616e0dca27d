"""Actions as the scheduler sees them: what they need, how long they take, since when they wait.

An action is one external call: a tool, a test run, a reward (ARL-Tangram, section 3). Its cost is a
vector over named resources, in whole units: cores, MiB, GPU units, concurrent calls of an API. At
most one of them is *elastic*: more of it makes the action shorter.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from troupe.scheduling.elastic import order

Amounts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Elastic:
    """The one resource that an action can use more or less of.

    `seconds[i]` is how long it takes with `levels[i]` units; levels ascend, seconds are positive.
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
        """Index of the highest level of at most `units`; the lowest where none is."""
        return max(0, bisect.bisect_right(self.levels, units) - 1)


@dataclass(frozen=True, slots=True)
class Action:
    """One action that waits. Times are seconds on the caller's clock.

    `needs` are the amounts that it takes whatever it is given of `elastic`, whose resource is not
    among them. `seconds` is its duration when nothing of it is elastic. `waiters` is how many
    trajectories cannot go on without it, and `place` where a discipline puts it (`order`); None:
    where its arrival does. Both only matter to `turn`. `function` is what hosts are warm for,
    and `host` the only one where it can run (its sandbox with files is there); both only matter to
    `decide_over`.
    """

    action_id: str
    since: float
    needs: Amounts = field(default_factory=dict)
    elastic: Elastic | None = None
    seconds: float = 1.0
    waiters: int = 1
    function: str = ""
    host: str | None = None
    place: float | None = None
    least: Amounts = field(init=False, repr=False, compare=False)
    """The smallest vector of resources with which it can run."""
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
        """What it does with `resource`, be that elastic or one fixed level; None: it needs none."""
        if self.elastic is not None and self.elastic.resource == resource:
            return self.elastic
        amount = self.least.get(resource, 0)
        if not amount:
            return None
        seconds = self.seconds if self.elastic is None else self.elastic.seconds[0]
        return Elastic(resource, (amount,), (seconds,))


@dataclass(frozen=True, slots=True)
class Running:
    """An action that runs: what it holds, and when it is expected to end."""

    holds: Amounts
    ends: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Start `action` now with the resources `holds`; it is expected to take `seconds`."""

    action: Action
    holds: Amounts
    seconds: float


def turn(action: Action) -> tuple[float, str]:
    """Sorts a queue: by `place`, else by arrival (`troupe.scheduling.elastic.order`)."""
    place = action.place
    if place is None:
        place = order.first_come(action.since, action.waiters)
    return place, action.action_id


def lacking(action: Action, capacity: Amounts) -> str | None:
    """The resource of which there will never be enough for `action`, if there is one."""
    return next((r for r, need in action.least.items() if need > capacity.get(r, 0)), None)
