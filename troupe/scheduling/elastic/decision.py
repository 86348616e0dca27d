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

from troupe.scheduling.elastic.actions import Action, Amounts, Grant, Running
from troupe.scheduling.elastic.allocation import Split
from troupe.scheduling.elastic.tail import waiting_seconds


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of one decision's work.

    `depth`: how many of the actions that fit may be held back. `horizon`: of how many of those
    that wait the ends are estimated one by one.
    """

    depth: int = 8
    horizon: int = 32

    def __post_init__(self) -> None:
        if self.depth < 0 or self.horizon < 1:
            raise ValueError(f"depth = {self.depth} < 0, or horizon = {self.horizon} < 1")


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
        for resource, amount in action.needs.items():
            left[resource] -= amount
    levels: dict[str, int] = {}
    ends = list(running)
    for resource in dict.fromkeys(a.elastic.resource for a in fitting if a.elastic is not None):
        members = [a for a in fitting if a.elastic is not None and a.elastic.resource == resource]
        fixed = [(a.seconds, a.needs[resource]) for a in fitting if a.needs.get(resource)]
        releases = [(max(0.0, r.ends - now), held) for r in ends if (held := r.holds.get(resource))]
        releases += fixed
        levels |= _share(resource, members, left[resource], releases, waiting, rules)
    return [
        _grant(action, levels.get(action.action_id))
        for action in fitting
        if action.elastic is None or action.action_id in levels
    ]


def _fitting(
    queue: Sequence[Action], free: Amounts, quotas: frozenset[str]
) -> tuple[list[Action], list[Action]]:
    """What can start at its lowest level in the order of the queue, and what has to wait."""
    left = dict(free)
    blocked: set[str] = {resource for resource, amount in free.items() if amount <= 0}
    fitting: list[Action] = []
    waiting: list[Action] = []
    for place, action in enumerate(queue):
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
    split = Split(options, units - sum(lowest[:fewest]))
    behind = (option for a in waiting if (option := a.on(resource)) is not None)
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
        ends = [(o.seconds[o.levels.index(level)], level) for o, level in starting]
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


def _grant(action: Action, level: int | None) -> Grant:
    holds, seconds = dict(action.needs), action.seconds
    if action.elastic is not None and level is not None:
        holds[action.elastic.resource] = level
        seconds = action.elastic.seconds[action.elastic.levels.index(level)]
    return Grant(action, holds, seconds)
