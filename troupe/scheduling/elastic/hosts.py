"""Elastic scheduling over hosts: which actions start now, on which host, and with how much.

    grants = decide_over(hosts, queue, now, rules, shared={"api:judge": 3}, quotas={"api:judge"})
    for grant in grants:
        start(grant.action, on=grant.host, with_=grant.holds)  # expected to take grant.seconds

An action runs on one host as a whole; resources of no host (the quota of an external interface) are
`shared`. ARL-Tangram (section 3) describes one pool of cores and no hosts, so this is ours: in the
order of the queue every action goes to the host where it is expected to end first, given an even
share of that host, plus `DecisionBounds.cold_seconds` where its function never ran; then the cores
of each host are split (`decision.split`).

Order: an action that fits nowhere *reserves*, of the hosts that are large enough for it, the one
that lacks least. No later action that needs any of the same resources starts there until it fits,
so that it starts eventually, however many small actions follow. On other hosts they pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    `free`: unheld units of each resource; `running`: the holders of the others. `functions` have
    run there and are warm. `capacity`: free + held, computed if not given.
    """

    name: str
    free: Amounts
    running: Collection[Running] = ()
    functions: Collection[str] = ()
    capacity: Amounts | None = None

    def total(self) -> Amounts:
        """Return the units of each resource, free or not."""
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
        # Blocked resources with the queue position that they are reserved for; -1: none are left.
        self.blocked = {resource: -1 for resource, amount in self.left.items() if amount <= 0}
        self.members: list[tuple[int, Action]] = []
        # By elastic resource: lowest levels of the actions placed here, which will share the rest.
        self._sharers: dict[str, int] = {}

    @property
    def open(self) -> bool:
        return len(self.blocked) < len(self.left)

    @cached_property
    def total(self) -> Amounts:
        return self.host.total()

    def block(self, resources: Iterable[str], order: int) -> None:
        """Reserve these resources against all later actions."""
        for resource in resources:
            self.blocked[resource] = min(order, self.blocked.get(resource, order))
            self.left.setdefault(resource, 0)

    def distance(self, needs: Amounts) -> tuple[bool, int, int]:
        """Sort key of hosts on which `needs` do not fit: how much is missing."""
        short = sum(max(0, need - self.left.get(r, 0)) for r, need in needs.items())
        return self.contested(needs), short, self.index

    def takes(self, action: Action) -> bool:
        """Return whether the action may run here at all."""
        return action.host is None or action.host == self.host.name

    def contested(self, needs: Amounts) -> bool:
        """Return whether some of `needs` are reserved already."""
        return not self.blocked.keys().isdisjoint(needs)

    def lacks(self, needs: Amounts, order: int) -> list[str]:
        """Return the needs that are not available here to position `order` of the queue."""
        left, blocked = self.left, self.blocked
        return [
            r
            for r, need in needs.items()
            if left.get(r, 0) < need or (r in blocked and blocked[r] < order)
        ]

    def expected(self, action: Action, needs: Amounts, rules: DecisionBounds) -> tuple[float, int]:
        """Sort key of hosts on which `action` fits: seconds, and (negative) the units left."""
        cold = action.function and action.function not in self.host.functions
        seconds = rules.cold_seconds if cold else 0.0
        elastic = action.elastic
        if elastic is None:
            seconds += action.seconds
            roomy = min((self.left[r] - need for r, need in needs.items()), default=0)
        else:
            sharers = self._sharers.get(elastic.resource, 0)
            roomy = (self.left[elastic.resource] + sharers) // (sharers + 1)
            seconds += elastic.seconds[elastic.within(roomy)]
        return seconds, -roomy

    def put(self, order: int, action: Action, needs: Amounts) -> None:
        """Place the action here, at its lowest level at least."""
        self.members.append((order, action))
        for resource, need in needs.items():
            self.left[resource] -= need
        if action.elastic is not None:
            resource = action.elastic.resource
            self._sharers[resource] = self._sharers.get(resource, 0) + action.elastic.levels[0]


def decide_over(
    hosts: Sequence[Host],
    queue: Sequence[Action],
    now: float,
    rules: DecisionBounds = _RULES,
    *,
    shared: Amounts = _NOTHING,
    quotas: Collection[str] = (),
) -> list[Placed]:
    """Return the actions of `queue` to start now, in its order, each on one of `hosts`.

    `shared`: free units of resources that belong to no host; a name is either there or on hosts.
    `now` and `Running.ends` are on one clock. `Action.host` is the only host where an action can
    run. Nothing is granted beyond what is free. An action that keeps waiting shares a resource with
    an earlier one that waits too, or does not fit.

    An action that lacks only `quotas` (limits of a function or of an external interface, of either
    kind) lets others use everything else, since idle cores do not restore a quota. One that lacks
    anything else reserves all that it needs, or it might wait for ever for one resource and then
    for the other. Raises ValueError for an action that is elastic in a shared resource.
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
    # An action that a host holds back for the benefit of others may start on another with idle
    # units.
    for order, action, keeper in sorted(held, key=lambda entry: entry[0]):
        assert action.elastic is not None  # only elastic actions are held back
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
        else:  # reserved: later held-back actions do not overtake it there
            keeper.block(needs, order)
    started.sort(key=lambda pair: pair[0])
    return [placed for _, placed in started]


def nowhere(action: Action, hosts: Mapping[str, Amounts], shared: Amounts = _NOTHING) -> str | None:
    """Return the resource for lack of which `action` can never run; None if it can.

    `hosts`: capacities by name. Of the closest host, the first that it lacks; `"host"` when
    `Action.host` is unknown.
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
    """Place what fits at its lowest level on its best host, in order; return what has to wait."""
    blocked = {resource for resource, amount in shared.items() if amount <= 0}
    waiting: list[Action] = []
    # Kinds that found no host and whose equals would block nothing more.
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
        # Hosts without room for a kind stay without.
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
        if _reserve(places, (order, action), needs, missing, blocked, quotas):
            settled.add(action.kind)
    return waiting


def _best(
    fitting: Sequence[_PlannedHost], action: Action, needs: Amounts, rules: DecisionBounds
) -> _PlannedHost | None:
    """Return the host on which the action is expected to end first; the first of equals."""
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return min(fitting, key=lambda place: place.expected(action, needs, rules))


def _reserve(
    places: Sequence[_PlannedHost],
    who: tuple[int, Action],
    needs: Amounts,
    missing: Sequence[str],
    blocked: set[str],
    quotas: frozenset[str],
) -> bool:
    """Block what a waiting action needs; return whether an equal action would block nothing
    new."""
    order, action = who
    # Only hosts that are large enough: others would be kept idle for what never runs there.
    able = [
        place
        for place in places
        if place.takes(action) and all(place.total.get(r, 0) >= n for r, n in needs.items())
    ]
    if not able:
        return True
    for place in able:
        lacks = place.lacks(needs, order)
        if quotas.issuperset(lacks) and quotas.issuperset(missing):
            blocked.update(missing)
            place.block(lacks, order)
            return True
    blocked.update(resource for resource in action.least if resource not in needs)
    # The key of the best host never grows, since nothing starts there, and falls whenever something
    # ends there: so the first of the queue starts eventually.
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
    """Return the grants for the members of a host; members that are held back are added to
    `held`."""
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
