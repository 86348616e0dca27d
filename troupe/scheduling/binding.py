"""Binding of policies to training devices: bound while they have work, suspended while others need
the devices.

FlexMARL, section 4 (arXiv 2602.09578), "agent-centric resource allocation". `decide` is a pure
function of each policy's work and the location of its training state. It returns the moves that are
due, and is called again after a change. Its rules:

* *Gang scheduling*: a policy gets all the devices that it needs at once, or none: of one worker, or
  of the fewest that have them together, each with as many ranks, on as few hosts as possible. The
  first worker of such a *group* leads: it may hold other policies too, which take turns there. The
  others lend it their devices, and hold policies of that group only.
* *Oldest work first*, so that no policy starves: a policy with younger work gives way after its
  quantum, and what the oldest waits for is kept free for it. A quantum is at least twice what
  suspending and resuming the policy cost the last time, so that swaps take a third of it at most.
  A job's `priority` makes its work count as older by a fixed time (`Policy.ahead`).
* *A policy without work keeps no device from one with work*; but it stays bound until then.
* *State moves rarely*: a policy goes where its state is, if there is room, and the state of the
  next one is prefetched while the present one computes.
* *Devices do not wait for a suspension*: a policy with prefetched state takes the place of a
  leaving one at once, and computes while the other's state moves out, if both states fit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

# Ids of the workers of a group, the leader first. Empty: a group that is yet to be formed, to which
# a worker would lend its devices.
Group = tuple[str, ...]
# A policy with work stays bound for so many times what its last swap cost.
_SWAP_PAYS = 2.0
_id_of: Callable[[WorkerPlan], str] = attrgetter("worker.worker_id")


@dataclass(eq=False)
class WorkerPlan:
    """One worker while a plan is made."""

    worker: RankWorker
    # Name of its host, or one of its own.
    host: str
    held: list[Policy] = field(default_factory=list)
    # Policies for which places are taken or kept free in this plan, bound as they will be.
    taken: list[Policy] = field(default_factory=list)
    # Policies bound in this plan.
    coming: list[Policy] = field(default_factory=list)
    # Its likeness at the last change of its policies.
    kind: Hashable = None

    def likeness(self) -> Hashable:
        """Return the properties that decide which policies may be bound here and at what price,
        except the policies' statements about this very worker."""
        one, here = self.worker, self.worker.worker_id
        others = (
            (other.policy, other.bound[:1] == (here,), other.working.get(here))
            for other in (*self.held, *self.taken)
        )
        size = one.slots, one.memory, one.device, one.load, one.devices, one.lends
        return (size, len(self.held), *others)

    def free(self, policy: Policy, gone: Container[str], group: Group) -> bool:
        """Return whether `policy`, bound to `group`, has a slot and memory here once the policies
        `gone` have left."""
        worker = self.worker
        others = [one for one in self.held if one.policy not in gone] + self.taken
        if worker.slots and len(others) >= worker.slots:
            return False
        # Policies whose groups this worker leads take turns on it.
        leader = group[:1] if group[:1] == (worker.worker_id,) else None
        for one in others:
            if one.bound != group and one.bound[:1] != leader:
                return False
        return worker.has_room([*others, policy])

    def can_take_over(self, policy: Policy, gone: Container[str]) -> bool:
        """Return whether `policy` may be bound here alone while `gone` still leave: its state is
        prefetched and has room."""
        here = self.worker.worker_id
        if here not in policy.prefetched or not self.free(policy, gone, (here,)):
            return False
        return self.room_beside(policy)

    def room_beside(self, policy: Policy) -> bool:
        """Return whether the policy's state has room in addition to all states that are here or
        come in this plan."""
        if not self.worker.memory:
            return True
        if not policy.size:  # never bound: its size is known when it is loaded
            return not (self.held or self.coming)
        return self.worker.has_room([*self.held, *self.coming, policy])

    @property
    def load(self) -> float:
        """Cost of the policies that are bound here or planned."""
        held = sum(one.cost for one in self.held)
        return self.worker.load + held + sum(one.cost for one in self.taken)


@dataclass(frozen=True, slots=True)
class BindingRules:
    """Default times in seconds of the caller's clock."""

    quantum: float = 1.0
    """Minimum time that a policy with work stays bound, whatever a swap costs."""
    idle: float = math.inf
    """Time without a further step after which an idle policy is released."""


@dataclass(frozen=True, slots=True)
class RankWorker:
    """One trainer worker, whose devices ranks of gangs run on."""

    worker_id: str
    slots: int = 0
    """Number of policies that it may hold at once; 0: any number."""
    memory: int = 0
    """Bytes that policies may use of each of its devices; 0: not bounded."""
    device: str = ""
    """Device class, "cpu" or "cuda"."""
    load: float = 0.0
    """Cost of what is bound to it beyond the policies passed to `decide`."""
    devices: int = 1
    """Most ranks of a gang on it."""
    host: str = ""
    """Its host; empty: one of its own."""
    lends: bool = True
    """Whether it takes part in gangs over several workers."""

    def needed(self, policies: Iterable[Policy]) -> int:
        """Return the bytes on each device that `policies` need together: their states, each base
        once, and what one of them needs while it computes, since they take turns."""
        size = working = 0
        bases: dict[str, int] = {}
        for one in policies:
            size += one.size
            working = max(working, one.working.get(self.worker_id, 0))
            bases[one.base] = max(bases.get(one.base, 0), one.base_size)
        return size + working + sum(bases.values())

    def has_room(self, policies: Iterable[Policy]) -> bool:
        """Return whether `policies` fit into the memory together."""
        return not self.memory or self.needed(policies) <= self.memory


@dataclass(frozen=True, slots=True)
class Policy:
    """Needs and location of one policy."""

    policy: str
    work: int = 0
    """Micro-batches that are ready to be computed; a due optimizer step counts as one."""
    since: float = 0.0
    """When the oldest of them became ready; without work: when the policy was bound or
    requested."""
    ahead: float = 0.0
    """Seconds by which its work counts as older than it is."""
    wanted: bool = True
    """Whether a step of it is open: then it takes a free device although it has no work yet."""
    ranks: int = 1
    """Number of devices in its gang."""
    size: int = 0
    """Bytes of its training state on each device of its gang, without `base`; 0: unknown."""
    base: str = ""
    """Name of the frozen weights under its adapter, which policies of a worker share."""
    base_size: int = 0
    """Bytes of these weights."""
    working: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it needs on each device in addition while it computes, by worker."""
    device: str = ""
    """Device class that it needs; empty: any."""
    cost: float = 1.0
    """Relative load that it puts on a worker that holds several policies."""
    bound: tuple[str, ...] = ()
    """Workers that hold it, or to which it is being bound, the leader of several first; empty: not
    bound."""
    bound_at: float = 0.0
    busy: bool = False
    """Whether the policy cannot be suspended now: it is being bound, steps, or publishes."""
    leaving: bool = False
    """Whether the policy is being suspended or released, so that its places become free."""
    accumulating: bool = False
    """Whether the policy has accumulated gradients of a step, which a release would lose."""
    near: frozenset[str] = frozenset()
    """Workers on whose host its state is, or that still hold it from before."""
    prefetched: frozenset[str] = frozenset()
    """Workers that have its state ready."""
    barred: frozenset[str] = frozenset()
    """Workers to which it must not be bound."""
    quantum: float | None = None
    """Overrides `BindingRules.quantum`."""
    swap: float = 0.0
    """Seconds in which its last suspension and its last resumption, together, kept devices from
    computing; 0: unknown."""
    idle: float | None = None
    """Overrides `BindingRules.idle`."""


def ready_micro_batches(samples: int, micro_batch: int, *, final: bool) -> int:
    """Return the micro-batches of a policy that could be computed now: its `Policy.work`.

    `samples` can be claimed, or are claimed and not in the gradients yet. Once no further sample
    can come (`final`), the rest is a micro-batch, too, and the optimizer step counts as one more.
    """
    return -(-samples // micro_batch) + 1 if final else samples // micro_batch


class ReadyOrder:
    """The times at which waiting micro-batches became ready, oldest first."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def note(self, ready: int, now: float) -> None:
        """Set how many wait now."""
        while len(self._times) > ready:
            self._times.popleft()
        while len(self._times) < ready:
            self._times.append(now)

    @property
    def oldest(self) -> float | None:
        """When the oldest became ready; None if none waits."""
        return self._times[0] if self._times else None


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind `policy` to all of `workers`, of which the first leads."""

    policy: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suspend:
    """Move the training state of `policy` off its devices, because `after` needs them."""

    policy: str
    after: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the state of `policy` to the workers to which it will be bound next."""

    policy: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Free the devices of `policy`; its committed state is on disk."""

    policy: str


Move = Bind | Suspend | Prefetch | Release


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """The moves that are due, in order; `again`: when to decide again if nothing happens before."""

    moves: tuple[Move, ...] = ()
    again: float = math.inf
    wanted: int = 0
    """Number of workers with which no policy with an open step would wait for another; 0: none is
    needed, and a deployment may scale to zero."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A policy too large for any gang: it needs `needed` bytes on each device, and the largest
    worker of its device class has `largest`."""

    policy: str
    needed: int
    largest: int


def too_large(policy: Policy, workers: Iterable[RankWorker]) -> TooLarge | None:
    """Return the reason why `policy` can never be bound to these workers; None if it can."""
    fitting = []
    for worker in workers:
        if _suits(policy, worker):
            if worker.has_room([policy]):
                return None
            fitting.append(worker)
    if not fitting:
        return None
    largest = max(fitting, key=lambda worker: worker.memory)
    return TooLarge(policy.policy, largest.needed([policy]), largest.memory)


@dataclass(frozen=True, slots=True)
class TooManyRanks:
    """A gang that is too small for a policy: the policy needs `ranks` devices, and the largest gang
    of the workers has `most`."""

    policy: str
    ranks: int
    most: int


def too_many_ranks(policy: Policy, workers: Iterable[RankWorker]) -> TooManyRanks | None:
    """Return the reason why these workers cannot form a gang for `policy`; None if they can, or if
    there are none that have memory for it (`too_large`)."""
    classes: dict[str, list[RankWorker]] = {}
    for worker in workers:
        if _suits(policy, worker) and worker.has_room([policy]):
            classes.setdefault(worker.device, []).append(worker)
    most = 0
    for some in classes.values():
        lent = sorted((one.devices for one in some if one.lends), reverse=True)
        # By the number of workers: the devices that so many have.
        shares = {1: max(one.devices for one in some)} | dict(enumerate(lent[1:], 2))
        if any(policy.ranks <= n * share for n, share in shares.items() if policy.ranks % n == 0):
            return None
        most = max(most, *(n * share for n, share in shares.items()))
    return TooManyRanks(policy.policy, policy.ranks, most) if classes else None


def decide(
    rules: BindingRules, policies: Sequence[Policy], workers: Sequence[RankWorker], now: float
) -> BindingPlan:
    """Return the moves that are due. Independent of the order of the arguments.

    A policy that is `too_large` is left out. Raises ValueError for two policies or workers of one
    name.
    """
    table = _Table(rules, policies, workers, now)
    table.place()
    table.fill()
    table.prefetch()
    table.release()
    return BindingPlan(tuple(table.moves), table.again(), _wanted(policies, workers))


def _suits(policy: Policy, worker: RankWorker) -> bool:
    return policy.device in ("", worker.device) and worker.worker_id not in policy.barred


def _wanted(policies: Iterable[Policy], workers: Sequence[RankWorker]) -> int:
    active = [one for one in policies if one.wanted or one.work]
    if not active:
        return 0
    # Workers with unbounded slots count one slot per policy: more of them are of use.
    slots = min((max(1, worker.slots) for worker in workers), default=1)
    devices = max((worker.devices for worker in workers), default=1)
    needed = [-(-one.ranks // devices) for one in active]
    return max(max(needed), -(-sum(needed) // slots))


class _RankOption(NamedTuple):
    """Alike workers that a policy could be bound to, in the order of their ids."""

    price: float
    harm: float
    far: int
    load: float
    plans: list[WorkerPlan]

    @property
    def worker(self) -> RankWorker:
        """One of them."""
        return self.plans[0].worker

    def rank(self) -> tuple[float, ...]:
        """Sort key, best first."""
        return self[:4]

    def order(self) -> tuple[tuple[float, ...], str]:
        """Return the same, with the first worker's id."""
        return self.rank(), self.worker.worker_id


# A way of placing a policy: its price, 0: free now, more: others must leave; what chooses workers.
_Way = tuple[float, Callable[[], list[WorkerPlan]]]


class _Table:
    """The moves of one plan while they are found."""

    def __init__(
        self,
        rules: BindingRules,
        policies: Sequence[Policy],
        workers: Sequence[RankWorker],
        now: float,
    ) -> None:
        self._rules, self._now = rules, now
        self._policies = {one.policy: one for one in sorted(policies, key=_age)}
        # Rank by age; the oldest is 0.
        self._rank = {name: rank for rank, name in enumerate(self._policies)}
        self._plans = {
            one.worker_id: WorkerPlan(one, one.host or f" {one.worker_id}")
            for one in sorted(workers, key=lambda one: one.worker_id)
        }
        if len(self._policies) != len(policies) or len(self._plans) != len(workers):
            raise ValueError("two policies or two workers of one name")
        for one in self._policies.values():
            for worker_id in one.bound:
                if worker_id in self._plans:
                    self._plans[worker_id].held.append(one)
        # Workers of each kind, in the order of their ids; empty until a policy waits.
        self._alike: dict[Hashable, list[WorkerPlan]] = {}
        # Workers with special statements by the policy to be placed.
        self._named: frozenset[WorkerPlan] = frozenset()
        self.moves: list[Move] = []
        # Policies that are leaving, or were suspended in this plan.
        self._gone = {one.policy for one in policies if one.leaving}
        # Workers that are kept free for each waiting policy.
        self._going: dict[str, tuple[str, ...]] = {}

    def _waiting(self, *, with_work: bool) -> list[Policy]:
        return [
            one
            for one in self._policies.values()
            if not one.bound
            and not one.leaving
            and (one.work > 0 if with_work else one.wanted and one.work == 0)
            and too_large(one, (plan.worker for plan in self._plans.values())) is None
        ]

    def place(self) -> None:
        """Bind policies with work, the oldest first, and suspend others to make room."""
        for policy in self._waiting(with_work=True):
            if (found := self._best(policy, below=1) or self._best(policy)) is None:
                continue  # too few workers: nothing is kept from the others
            price, workers = found
            chosen = workers()
            if price == 0:
                self._bind(policy, chosen)
                continue
            # Keep free what is free, what others are leaving, and what others are told to leave.
            first, names = chosen[0], tuple(map(_id_of, chosen))
            groups = [one.bound for one in (*first.held, *first.taken)]
            group = names if len(names) > 1 and names in groups else ()
            self._make_room(policy, first, group or (first.worker.worker_id,))
            for plan in chosen[1:]:
                self._make_room(policy, plan, group)
            if len(chosen) == 1 and first.can_take_over(policy, self._gone):
                self._bind(policy, chosen)
                continue
            self._going[policy.policy] = self._take(policy, chosen)

    def fill(self) -> None:
        """Bind policies with an open step but no work yet to places that would stay empty."""
        for policy in self._waiting(with_work=False):
            if free := self._best(policy, below=1):
                self._bind(policy, free[1]())

    def prefetch(self) -> None:
        """Prefetch the states of the policies that come next: one per worker."""
        busy = {w for one in self._policies.values() for w in one.prefetched if not one.bound}
        for policy in self._waiting(with_work=True):
            going = self._going.get(policy.policy, ())
            if policy.prefetched.issuperset(going) or busy.intersection(going):
                continue
            if len(going) > 1:
                continue  # no device of the leader holds the state of a group's gang
            # In addition to the state that computes there now, which leaves only when told to.
            if any(not self._plans[w].room_beside(policy) for w in going):
                continue
            busy.update(going)
            self.moves.append(Prefetch(policy.policy, going))

    def release(self) -> None:
        """Release policies that have been idle for long."""
        for policy in self._policies.values():
            if self._idle(policy) and self._now >= self._released_at(policy):
                self.moves.append(Release(policy.policy))

    def again(self) -> float:
        """Return when time alone changes the plan: at the end of a quantum or an idle time."""
        times = [self._released_at(one) for one in self._policies.values() if self._idle(one)]
        if self._going:
            bound = [one for one in self._policies.values() if one.bound and not one.leaving]
            times += [self._left_alone_until(one) for one in bound if one.work]
        return min((time for time in times if time > self._now), default=math.inf)

    def _left_alone_until(self, policy: Policy) -> float:
        quantum = self._rules.quantum if policy.quantum is None else policy.quantum
        return policy.bound_at + max(quantum, _SWAP_PAYS * policy.swap)

    def _released_at(self, policy: Policy) -> float:
        return policy.since + (self._rules.idle if policy.idle is None else policy.idle)

    def _idle(self, policy: Policy) -> bool:
        resting = policy.bound or policy.near
        active = policy.wanted or policy.work or policy.busy or policy.accumulating
        return bool(resting) and not active and policy.policy not in self._gone

    def _best(self, policy: Policy, below: float = math.inf) -> _Way | None:
        """Return the way of placing `policy` at the lowest price; None: there is none `below` a
        price (1: free now). Of equals the group of fewest workers; of as many the group that has
        its state, then workers that no other policy computes on, then the group whose leader, which
        holds all that the others hold, has least load."""
        if not self._alike:
            self._classify(self._plans.values())
        stays = {
            one.policy
            for one in self._policies.values()
            if below <= 1 or (self._price(policy, one) == math.inf and one.policy not in self._gone)
        }
        held, leading, lending = set[Group](), list[_RankOption](), list[_RankOption]()
        self._named = self._named_by(policy)
        for some in self._split(policy, self._alike.values()):
            plan = some[0]
            held.update(one.bound for one in (*plan.held, *plan.taken))
            left = len(plan.taken) + sum(one.policy in stays for one in plan.held)
            if 0 < plan.worker.slots <= left:
                continue
            if one := self._option(policy, some, (plan.worker.worker_id,), below):
                leading.append(one)
            # One that lends its devices to a new group holds nothing else.
            if not left and plan.worker.lends and (one := self._option(policy, some, (), below)):
                lending.append(one)
        leading.sort(key=_RankOption.order)
        lending.sort(key=_RankOption.order)
        groups = sorted(
            (group for group in held if len(group) > 1 and self._plans.keys() >= set(group)),
            key=lambda one: (not policy.near.issuperset(one), self._plans[one[0]].load, one),
        )
        near = sum(policy.near.issuperset(group) for group in groups)
        best: _Way | None = None
        for count in range(1, min(policy.ranks, len(self._plans)) + 1):
            if policy.ranks % count:
                continue
            leaders, lenders = (
                [one for one in options if one.worker.devices * count >= policy.ranks]
                for options in (leading, lending)
            )
            for price, way in chain(
                self._shared(policy, groups[:near], count, below),
                _formed(policy, leaders, lenders, count),
                self._shared(policy, groups[near:], count, below),
            ):
                if price < below:
                    best, below = (price, way), price
                if price == 0:
                    return best
        return best

    def _shared(
        self, policy: Policy, groups: Iterable[Group], count: int, below: float
    ) -> Iterator[_Way]:
        """Yield the ways (`_best`) of joining a group of `count` workers that other policies
        have."""
        for group in (one for one in groups if len(one) == count):
            members = [self._plans[name] for name in group]
            if any(one.worker.devices * count < policy.ranks for one in members):
                continue
            price, lenders = 0.0, _by_kind(members[1:]).values()
            for some in chain([members[:1]], self._split(policy, lenders)):
                if (option := self._option(policy, some, group, below)) is None:
                    break
                price = max(price, option.price)
            else:
                yield price, partial(list, members)

    def _named_by(self, policy: Policy) -> frozenset[WorkerPlan]:
        named = policy.near | policy.prefetched | policy.barred
        if policy.working and self._plans:
            ((usual, _),) = Counter(map(policy.working.get, self._plans)).most_common(1)
            named |= {one for one in self._plans if policy.working.get(one) != usual}
        return frozenset(self._plans[one] for one in self._plans.keys() & named)

    def _split(
        self, policy: Policy, kinds: Iterable[list[WorkerPlan]]
    ) -> Iterator[list[WorkerPlan]]:
        """Yield the workers in sets, each of which is the same to `policy`, from those that are
        alike."""
        for plans in kinds:
            if self._named.isdisjoint(plans):
                yield plans
                continue
            found: dict[Hashable, list[WorkerPlan]] = {}
            for plan in plans:
                here, said = plan.worker.worker_id, None
                if plan in self._named:
                    states = here in policy.near, here in policy.prefetched, here in policy.barred
                    said = *states, policy.working.get(here)
                found.setdefault(said, []).append(plan)
            yield from found.values()

    def _option(
        self, policy: Policy, plans: list[WorkerPlan], group: Group, below: float
    ) -> _RankOption | None:
        """Return the alike workers with the price (`_best`) of binding `policy` to one of them as
        one of `group`; None: it cannot be bound there `below` a price."""
        plan, price, who = plans[0], 0.0, list[Policy]()
        if not _suits(policy, plan.worker):
            return None
        if not plan.free(policy, (), group):
            if below <= 1 or (leavers := self._leavers(policy, plan, group)) is None:
                return None
            who, price = leavers, max((self._price(policy, one) for one in leavers), default=1)
        worker_id = plan.worker.worker_id
        far = 0 if worker_id in policy.prefetched else 1 if worker_id in policy.near else 2
        return _RankOption(price, self._harm(price, who), far, plan.load, plans)

    def _harm(self, price: float, who: Sequence[Policy]) -> float:
        """Return a sort key of ways to make room at the same price."""
        match price:
            case 2:
                return sum(one.accumulating for one in who)
            case 3:  # the youngest work is interrupted
                return -min(self._rank[one.policy] for one in who if one.work)
            case 4:  # wait for the quantum that ends first
                return max(map(self._left_alone_until, who))
            case _:
                return 0.0

    def _leavers(self, policy: Policy, plan: WorkerPlan, group: Group) -> list[Policy] | None:
        """Return the policies that must leave for `policy` in addition to those that leave already:
        as few as possible, those without work first, then those with the youngest work. None: that
        is not enough."""
        gone = self._gone.intersection(one.policy for one in plan.held)
        if plan.free(policy, gone, group):
            return []
        price = partial(self._price, policy)
        victims = sorted(
            (one for one in plan.held if one.policy not in gone and price(one) < math.inf),
            key=lambda one: (price(one), one.accumulating, -self._rank[one.policy]),
        )
        for count, victim in enumerate(victims, 1):
            gone.add(victim.policy)
            if plan.free(policy, gone, group):
                return victims[:count]
        return None

    def _price(self, policy: Policy, one: Policy) -> float:
        """Price at which `one` leaves for `policy`. 2: at once, without work; 3: at once, with
        younger work; 4: after its quantum, or when it can be suspended; inf: never."""
        if one.work and self._rank[one.policy] < self._rank[policy.policy]:
            return math.inf
        if one.busy:
            return 4
        if not one.work:
            return 2
        return 3 if self._now >= self._left_alone_until(one) else 4

    def _make_room(self, policy: Policy, plan: WorkerPlan, group: Group) -> None:
        for victim in self._leavers(policy, plan, group) or ():
            if self._price(policy, victim) < 4:
                self._gone.add(victim.policy)
                self.moves.append(Suspend(victim.policy, policy.policy))

    def _bind(self, policy: Policy, chosen: Sequence[WorkerPlan]) -> None:
        self.moves.append(Bind(policy.policy, self._take(policy, chosen)))
        for plan in chosen:
            plan.coming.append(policy)

    def _take(self, policy: Policy, chosen: Sequence[WorkerPlan]) -> tuple[str, ...]:
        """Take a place for `policy` on each of `chosen`; their ids."""
        names = tuple(map(_id_of, chosen))
        there = replace(policy, bound=names)
        moved = set(chosen)
        for kind in {plan.kind for plan in chosen}:
            if rest := [plan for plan in self._alike.pop(kind) if plan not in moved]:
                self._alike[kind] = rest
        for plan in chosen:
            plan.taken.append(there)
        self._classify(chosen)
        return names

    def _classify(self, plans: Iterable[WorkerPlan]) -> None:
        """Put `plans` to those that they are like."""
        for plan in plans:
            plan.kind = plan.likeness()
        for kind, some in _by_kind(plans).items():
            self._alike[kind] = sorted([*self._alike.get(kind, ()), *some], key=_id_of)


def _by_kind(plans: Iterable[WorkerPlan]) -> dict[Hashable, list[WorkerPlan]]:
    found: dict[Hashable, list[WorkerPlan]] = {}
    for plan in plans:
        found.setdefault(plan.kind, []).append(plan)
    return found


def _formed(
    policy: Policy, leaders: Sequence[_RankOption], lenders: Sequence[_RankOption], count: int
) -> Iterator[_Way]:
    """Yield the ways (`_Table._best`) of forming a new group of `count` workers."""
    if count == 1:
        yield from ((one.price, partial(list, one.plans[:1])) for one in leaders[:1])
        return
    leaders = [one for one in leaders if one.worker.lends]
    for device in sorted({one.worker.device for one in (*lenders, *leaders)}):
        options = [one for one in lenders if one.worker.device == device]
        yield _price(options, count), partial(_cheapest, policy, options, count)
        # A leader need not be empty.
        prices = {one.plans[0]: one.price for one in options}
        for one in leaders:
            leader = one.plans[0]
            if one.worker.device != device or one.price >= prices.get(leader, math.inf):
                continue
            others = _without(leader, options) if leader in prices else options
            if (price := _price(others, count - 1)) < math.inf:
                rest = partial(_cheapest, policy, others, count - 1, leader)
                yield max(one.price, price), rest
                break


def _price(options: Sequence[_RankOption], count: int) -> float:
    """Return the lowest price of `count` workers: the price of the most expensive one; inf: there
    are fewer."""
    for one in options:
        count -= len(one.plans)
        if count <= 0:
            return one.price
    return math.inf


def _without(leader: WorkerPlan, options: Iterable[_RankOption]) -> list[_RankOption]:
    """Return all of `options` but one worker, which is the first of its kind."""
    rest = [one._replace(plans=one.plans[1:]) if one.plans[0] is leader else one for one in options]
    return sorted((one for one in rest if one.plans), key=_RankOption.order)


def _cheapest(
    policy: Policy, options: Sequence[_RankOption], count: int, *leader: WorkerPlan
) -> list[WorkerPlan]:
    """Return the leader, if it is given, and `count` workers at the lowest price that so many
    have."""
    price, plans = _price(options, count), list[WorkerPlan]()
    for _, some in groupby((one for one in options if one.price <= price), _RankOption.rank):
        equals = [one.plans for one in some]
        plans += equals[0] if len(equals) == 1 else sorted(chain(*equals), key=_id_of)
    return [*leader, *_together(policy, plans, count)]


def _together(policy: Policy, plans: Sequence[WorkerPlan], count: int) -> list[WorkerPlan]:
    """Choose `count` of `plans` (best first) on few hosts: hosts near the state, then whole hosts,
    then the host where the rest fits best. Workers of a host are neighbours; the first leads.
    """
    near = [plan for plan in plans if plan.worker.worker_id in policy.near][:count]
    chosen, taken = list(near), set(near)
    left: dict[str, list[WorkerPlan]] = {}
    for plan in plans:
        if plan not in taken:
            left.setdefault(plan.host, []).append(plan)
    for host in dict.fromkeys(plan.host for plan in near):
        chosen += left.pop(host, [])[: count - len(chosen)]
    hosts = sorted(left.values(), key=len, reverse=True)
    for at, some in enumerate(hosts):
        needed = count - len(chosen)
        if len(some) >= needed:
            # The smallest that is enough; of equals the one that is best for it.
            chosen += min((one for one in hosts[at:] if len(one) >= needed), key=len)[:needed]
            break
        chosen += some
    ranks = {host: rank for rank, host in enumerate(dict.fromkeys(plan.host for plan in chosen))}
    return sorted(chosen, key=lambda plan: ranks[plan.host])


def _age(policy: Policy) -> tuple[float, float, str]:
    """Sort key, oldest first; of equals the costliest, which is hardest to place."""
    return (policy.since - policy.ahead, -policy.cost, policy.policy)
