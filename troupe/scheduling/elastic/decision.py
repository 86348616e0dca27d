"""Which actions start now, and with how much: elastic scheduling of single actions.

ARL-Tangram (arXiv 2603.13019), section 3, minimises the sum of action completion times (waiting
plus running). Actions start in the order of the queue: what waits for a resource is not overtaken
by what would take any of its resources. Of those that could start, the last ones are held back
while the others, with their share, gain more than they and all behind them lose.

Decided here, where the paper is silent: the greedy loop stops at the first action that is better
not held back, ours looks at all of the last `depth`, which costs one table for all of them; nobody
is held back for units that then lie idle; and the first action of a resource always starts, so
that the system never stands still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from troupe.scheduling.elastic.actions import Action, Amounts, Grant, Running
from troupe.scheduling.elastic.allocation import best_split
from troupe.scheduling.elastic.tail import waiting_seconds

# So many times the horizon of those that wait are looked at for actions that want a resource.
_SEEN: Final = 8


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of one decision's work.

    `depth`: how many of the actions that fit may be held back. `horizon`: of how many of those
    that wait the ends are estimated one by one. `cold_seconds`: what an action is expected to take
    longer on a host where its function never ran (`hosts`).
    """

    depth: int = 8
    horizon: int = 32
    cold_seconds: float = 0.5

    def __post_init__(self) -> None:
        if self.depth < 0 or self.horizon < 1:
            raise ValueError(f"depth = {self.depth} < 0, or horizon = {self.horizon} < 1")
        if not self.cold_seconds >= 0:
            raise ValueError(f"cold_seconds = {self.cold_seconds} is negative")


def decide(
    queue: Sequence[Action],
    free: Amounts,
    running: Iterable[Running],
    now: float,
    rules: Rules = Rules(),
    *,
    quotas: Collection[str] = (),
) -> list[Grant]:
    """The actions of `queue` to start now, in its order (`turn` sorts it).

    `free` are the units of each resource that nobody holds; `now` and `Running.ends` are on one
    clock. No resource is ever given out beyond what is free. Whatever waits on shares a resource
    with something before it that waits too, or does not fit.

    An action that lacks nothing but `quotas` (limits of a function or of an interface outside)
    lets others pass on everything else, since cores that lie idle bring no quota back. One that
    lacks anything else keeps all that it needs from those behind it, or it might wait for ever for
    the one thing and then for the other.
    """
    fitting, waiting = _fitting(queue, free, frozenset(quotas))
    left = dict(free)
    for action in fitting:
        for resource, need in action.least.items():
            left[resource] -= need
    levels = split(fitting, left, running, waiting, now, rules)
    return [
        grant(action, levels.get(action.action_id))
        for action in fitting
        if action.elastic is None or action.action_id in levels
    ]


def split(
    fitting: Sequence[Action],
    left: dict[str, int],
    running: Iterable[Running],
    waiting: Sequence[Action],
    now: float,
    rules: Rules,
) -> dict[str, int]:
    """Levels, by action id, of the elastic ones of `fitting` that start.

    `left` are the units of one host when each of `fitting` has its lowest level, and in the end
    what nobody got. `waiting` are behind them.
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


def _fitting(
    queue: Sequence[Action], free: Amounts, quotas: frozenset[str]
) -> tuple[list[Action], list[Action]]:
    """What can start at its lowest level in the order of the queue, and what has to wait."""
    left = dict(free)
    blocked: set[str] = {resource for resource, amount in free.items() if amount <= 0}
    fitting: list[Action] = []
    waiting: list[Action] = []
    # What found nothing: the same once more finds nothing either, and blocks nothing new.
    settled: set[str] = set()
    for place, action in enumerate(queue):
        if action.kind in settled:
            waiting.append(action)
            continue
        if len(blocked) >= len(left):
            # Nobody can pass; what needs no resource at all would, and there is no such thing.
            waiting += queue[place:]
            break
        least = action.least
        lacks = [r for r, need in least.items() if r in blocked or left.get(r, 0) < need]
        if not lacks:
            fitting.append(action)
            for resource, need in least.items():
                left[resource] -= need
            continue
        waiting.append(action)
        settled.add(action.kind)
        blocked.update(lacks if quotas.issuperset(lacks) else least)
        left.update({resource: 0 for resource in least if resource not in left})
    return fitting, waiting


def _share(
    resource: str,
    members: Sequence[Action],
    units: int,
    releases: list[tuple[float, int]],
    waiting: Sequence[Action],
    rules: Rules,
) -> dict[str, int]:
    """Levels, by action, of the members that start; `units` is what they have together."""
    options = [action.elastic for action in members if action.elastic is not None]
    lowest = [option.levels[0] for option in options]
    fewest = max(1, len(members) - rules.depth)
    split = best_split(options, units - sum(lowest[:fewest]))
    # The first of those that wait stand for all; most of them may want none of it.
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
            continue  # held back, and nobody gains what it would have taken
        starting = list(zip(options[:count], chosen, strict=True))
        ends = [(o.seconds[o.within(level)], level) for o, level in starting]
        tail = [*options[count:], *queued]
        objective = split.seconds(count, spare) + waiting_seconds(
            tail, idle, [*releases, *ends], beyond=max(0, beyond)
        )
        # Equal objectives: rather start it.
        if best is None or objective < best[0] * (1 - 1e-12):
            best = (objective, count, chosen)
    assert best is not None  # there is at least one member
    started = members[: best[1]]
    return {action.action_id: level for action, level in zip(started, best[2], strict=True)}


def grant(action: Action, level: int | None) -> Grant:
    """`action` with `level` units of what it is elastic in."""
    holds, seconds = dict(action.needs), action.seconds
    if action.elastic is not None and level is not None:
        holds[action.elastic.resource] = level
        seconds = action.elastic.seconds[action.elastic.within(level)]
    return Grant(action, holds, seconds)
