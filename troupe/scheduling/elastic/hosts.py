"""Which actions start now, on which host, and with how much: `decide` over several hosts.

    grants = decide_over(hosts, queue, now, rules, shared={"api:judge": 3}, quotas={"api:judge"})
    for grant in grants:
        start(grant.action, on=grant.host, with_=grant.holds)  # expected to take grant.seconds

An action runs on one host as a whole; what belongs to no host (the quota of an interface outside)
is `shared`. ARL-Tangram (section 3) describes one pool of cores and says nothing of hosts, so this
is ours: every action goes, in the order of the queue, to the host where it is expected to end
first, given an even share of that host and `DecisionBounds.cold_seconds` more where its function
never ran; then the cores of each host are split as on one host. With one host it is `decide`.

Order: what fits nowhere *reserves* the host that lacks least for it. Nothing that needs any of the
same resources starts there until it fits, so that what is reserved can only grow, and it starts
however many small actions come after it. On other hosts they pass, since nothing there is its.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from troupe.scheduling.elastic.decision import (
    Action,
    Amounts,
    DecisionBounds,
    Grant,
    Running,
    grant,
    lacking,
    split,
)

_NOTHING: Final[Amounts] = {}
_RULES: Final = DecisionBounds()


@dataclass(frozen=True, slots=True)
class Host:
    """One host as the scheduler sees it.

    `free` are the units of each of its resources that nobody holds, and `running` what holds the
    others. `functions` have run there and are warm. `near` are, of some resources, the most free
    units that are close to each other (one NUMA node). `capacity` is free + held, which is what it
    is taken for when it is not given.
    """

    name: str
    free: Amounts
    running: Collection[Running] = ()
    functions: Collection[str] = ()
    near: Amounts = field(default_factory=dict)
    capacity: Amounts | None = None

    def total(self) -> Amounts:
        """Units of each resource, free or not."""
        if self.capacity is not None:
            return self.capacity
        total = dict(self.free)
        for running in self.running:
            for resource, amount in running.holds.items():
                total[resource] = total.get(resource, 0) + amount
        return total


@dataclass(frozen=True, slots=True)
class Placed(Grant):
    """A grant on the host of that name."""

    host: str


class _PlannedHost:
    """A host while a decision is made."""

    def __init__(self, index: int, host: Host) -> None:
        self.index, self.host = index, host
        self.left = dict(host.free)
        # Resources of which nothing is to be had (-1), or which somebody waits for: its place in
        # the queue.
        self.blocked = {resource: -1 for resource, amount in self.left.items() if amount <= 0}
        self.members: list[tuple[int, Action]] = []
        # Of each elastic resource: units at the start less fixed shares, and who will split them.
        self._crowd: dict[str, int] = {}

    @property
    def open(self) -> bool:
        return len(self.blocked) < len(self.left)

    @cached_property
    def total(self) -> Amounts:
        return self.host.total()

    def block(self, resources: Iterable[str], order: int) -> None:
        """Nobody behind gets any of these."""
        for resource in resources:
            self.blocked[resource] = min(order, self.blocked.get(resource, order))
            self.left.setdefault(resource, 0)

    def distance(self, needs: Amounts) -> tuple[bool, int, int]:
        """Sorts the hosts on which `needs` do not fit: how far they are from it."""
        short = sum(max(0, need - self.left.get(r, 0)) for r, need in needs.items())
        return self.contested(needs), short, self.index

    def takes(self, action: Action) -> bool:
        """Whether it may run here at all."""
        return action.host is None or action.host == self.host.name

    def contested(self, needs: Amounts) -> bool:
        """Whether somebody waits for some of them already."""
        return not self.blocked.keys().isdisjoint(needs)

    def lacks(self, needs: Amounts, order: int) -> list[str]:
        """Those of `needs` that are not to be had here, in that place in the queue."""
        left, blocked = self.left, self.blocked
        return [
            r
            for r, need in needs.items()
            if left.get(r, 0) < need or (r in blocked and blocked[r] < order)
        ]

    def expected(
        self, action: Action, needs: Amounts, rules: DecisionBounds
    ) -> tuple[float, bool, int]:
        """Sorts the hosts on which `action` fits: seconds, whether it is split over nodes, and
        the units (negative) of what there is most of."""
        cold = action.function and action.function not in self.host.functions
        seconds = rules.cold_seconds if cold else 0.0
        elastic = action.elastic
        if elastic is None:
            seconds += action.seconds
            roomy = min((self.left[r] - need for r, need in needs.items()), default=0)
        else:
            crowd = self._crowd.get(elastic.resource, 0)
            roomy = (self.left[elastic.resource] + crowd) // (crowd + 1)
            seconds += elastic.seconds[elastic.within(roomy)]
        near = self.host.near
        far = bool(near) and any(near.get(r, need) < need for r, need in needs.items())
        return seconds, far, -roomy

    def put(self, order: int, action: Action, needs: Amounts) -> None:
        """It starts here, at its lowest level at least."""
        self.members.append((order, action))
        for resource, need in needs.items():
            self.left[resource] -= need
        if action.elastic is not None:
            resource = action.elastic.resource
            self._crowd[resource] = self._crowd.get(resource, 0) + action.elastic.levels[0]


def decide_over(
    hosts: Sequence[Host],
    queue: Sequence[Action],
    now: float,
    rules: DecisionBounds = _RULES,
    *,
    shared: Amounts = _NOTHING,
    quotas: Collection[str] = (),
) -> list[Placed]:
    """The actions of `queue` to start now, in its order (`turn` sorts it), each on one of `hosts`.

    `shared` are the free units of what belongs to no host; a name is either there or on hosts.
    `quotas` are as in `decide`, of either kind. An `Action.host` is the only one where it can run.
    No resource of any host is ever given out beyond what is free. Raises ValueError for an action
    that is elastic in what is shared.
    """
    for action in queue if shared else ():
        if action.elastic is not None and action.elastic.resource in shared:
            elastic = action.elastic.resource
            raise ValueError(f"{action.action_id} is elastic in {elastic}, which no host has")
    places = [_PlannedHost(index, host) for index, host in enumerate(hosts)]
    waiting = _place(places, queue, rules, dict(shared), frozenset(quotas))
    started: list[tuple[int, Placed]] = []
    held: list[tuple[int, Action, _PlannedHost]] = []
    for place in places:
        if place.members:
            behind = waiting[place.index :: len(places)]
            started += _split(place, behind, now, rules, held)
    # What a host keeps back, so that others there get more, may start where units lie idle.
    for order, action, keeper in sorted(held, key=lambda entry: entry[0]):
        assert action.elastic is not None  # others are not kept back
        needs = {r: need for r, need in action.least.items() if r not in shared}
        fitting = [p for p in places if p.takes(action) and not p.lacks(needs, order)]
        found = _best(fitting, action, needs, rules)
        if found is not None:
            index = action.elastic.within(found.left[action.elastic.resource])
            granted = grant(action, action.elastic.levels[index])
            for resource, amount in granted.holds.items():
                if resource in needs:
                    found.left[resource] -= amount
            started.append((order, Placed(action, granted.holds, granted.seconds, found.host.name)))
        else:  # it is the next one there: what is kept back behind it does not overtake it
            keeper.block(needs, order)
    started.sort(key=lambda pair: pair[0])
    return [placed for _, placed in started]


def nowhere(action: Action, hosts: Mapping[str, Amounts], shared: Amounts = _NOTHING) -> str | None:
    """The resource for want of which `action` will never run, if there is one.

    `hosts` are the capacities of hosts by name. Of the host that comes closest, the first that it
    lacks; `"host"` where `Action.host` is none of them.
    """
    names = hosts if action.host is None else {action.host} & hosts.keys()
    if not names:
        return "host"
    reasons = [lacking(action, {**hosts[name], **shared}) for name in names]
    return None if None in reasons else reasons[0]


def _place(
    places: Sequence[_PlannedHost],
    queue: Sequence[Action],
    rules: DecisionBounds,
    shared: dict[str, int],
    quotas: frozenset[str],
) -> list[Action]:
    """Put what fits at its lowest level where it is best, in the order of the queue; returns what
    has to wait."""
    blocked = {resource for resource, amount in shared.items() if amount <= 0}
    waiting: list[Action] = []
    # What found nothing, and stands in nobody's way more than others before it do.
    settled: set[str] = set()
    roomy: dict[str, list[_PlannedHost]] = {}
    for order, action in enumerate(queue):
        if action.kind in settled:
            waiting.append(action)
            continue
        if len(blocked) >= len(shared) and not any(place.open for place in places):
            waiting += queue[order:]
            break
        least = action.least
        missing = [r for r, n in least.items() if r in shared and (r in blocked or shared[r] < n)]
        needs = {r: n for r, n in least.items() if r not in shared} if shared else least
        # Where there was no room for its kind there will be none.
        fitting = roomy.get(action.kind)
        if fitting is None:
            fitting = [place for place in places if place.takes(action)]
        roomy[action.kind] = fitting = [p for p in fitting if not p.lacks(needs, order)]
        found = None if missing else _best(fitting, action, needs, rules)
        if found is not None:
            found.put(order, action, needs)
            for resource, need in least.items():
                if resource in shared:
                    shared[resource] -= need
            continue
        waiting.append(action)
        if _stand(places, (order, action), needs, missing, blocked, quotas):
            settled.add(action.kind)
    return waiting


def _best(
    fitting: Sequence[_PlannedHost], action: Action, needs: Amounts, rules: DecisionBounds
) -> _PlannedHost | None:
    """Where it is expected to end first; the first of equal ones."""
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return min(fitting, key=lambda place: place.expected(action, needs, rules))


def _stand(
    places: Sequence[_PlannedHost],
    who: tuple[int, Action],
    needs: Amounts,
    missing: Sequence[str],
    blocked: set[str],
    quotas: frozenset[str],
) -> bool:
    """Block what an action waits for; returns whether the same again would block nothing new."""
    order, action = who
    able = [place for place in places if place.takes(action)]
    for place in able:
        lacks = place.lacks(needs, order)
        if quotas.issuperset(lacks) and quotas.issuperset(missing):
            blocked.update(missing)
            place.block(lacks, order)
            return True
    blocked.update(resource for resource in action.least if resource not in needs)
    # Those that are large enough, or it would wait at a small one for ever.
    able = [p for p in able if all(p.total.get(r, 0) >= n for r, n in needs.items())] or able
    if not able:
        return True
    # This key of the best host never grows from one decision to the next, since nothing starts
    # there, and falls whenever something ends there: so the first in the queue starts in the end.
    best = min(able, key=lambda place: place.distance(needs))
    contested = best.contested(needs)
    best.block(needs, order)
    return contested


def _split(
    place: _PlannedHost,
    behind: Sequence[Action],
    now: float,
    rules: DecisionBounds,
    held: list[tuple[int, Action, _PlannedHost]],
) -> list[tuple[int, Placed]]:
    """How much the members of `place` get; those that are kept back are added to `held`."""
    levels = split(
        [action for _, action in place.members], place.left, place.host.running, behind, now, rules
    )
    started: list[tuple[int, Placed]] = []
    for order, action in place.members:
        level = levels.get(action.action_id)
        if action.elastic is not None and level is None:
            held.append((order, action, place))
            continue
        granted = grant(action, level)
        started.append((order, Placed(action, granted.holds, granted.seconds, place.host.name)))
    return started
