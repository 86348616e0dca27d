"""Which policies hold training devices: bound while they have work, suspended while others need the
devices.

FlexMARL, section 4 (arXiv 2602.09578), "agent-centric resource allocation". `decide` is a pure
function of each policy's work and of the location of its training state; it returns the moves that
are due, and is called again when something has changed. Its rules:

* *Gang scheduling*: a policy gets all the workers that it needs at once, or none.
* *Oldest work first*, so that no policy starves: a policy with younger work gives way after its
  quantum, and what the oldest waits for is kept free for it.
* *A policy without work keeps no device from one with work*; but it stays bound until then.
* *State moves rarely*: a policy goes where its state is, if there is room, and the state of the
  next one is prefetched while the present one computes.
* *Devices do not wait for a suspension*: a policy with prefetched state takes the place of a
  leaving one at once, and computes while the other's state moves out, if both states fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class WorkerPlan:
    """One worker while a plan is made."""

    worker: RankWorker
    held: list[Policy] = field(default_factory=list)
    # Policies for which places are taken or kept free in this plan.
    taken: list[Policy] = field(default_factory=list)
    # Policies bound in this plan.
    coming: list[Policy] = field(default_factory=list)

    def free(self, policy: Policy, gone: Iterable[str] = ()) -> bool:
        """Whether `policy` has a slot and memory here once the policies `gone` have left."""
        worker, names = self.worker, set(gone)
        stay = [one for one in self.held if one.policy not in names]
        if worker.slots and len(stay) + len(self.taken) >= worker.slots:
            return False
        return worker.has_room([*stay, *self.taken, policy])

    def can_take_over(self, policy: Policy, gone: Iterable[str]) -> bool:
        """Whether `policy` may be bound while `gone` still leave: its state is prefetched and has
        room."""
        if self.worker.worker_id not in policy.prefetched or not self.free(policy, gone):
            return False
        return self.room_beside(policy)

    def room_beside(self, policy: Policy) -> bool:
        """Whether the policy's state has room beside all states that are here or come in this
        plan."""
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
    """Minimum time that a policy with work stays bound, so that a swap pays."""
    idle: float = math.inf
    """Time without a further step after which an idle policy is released."""


@dataclass(frozen=True, slots=True)
class RankWorker:
    """One trainer worker: a rank of the gangs that it belongs to."""

    worker_id: str
    slots: int = 0
    """Number of policies that it may hold at once; 0: any number."""
    memory: int = 0
    """Bytes that policies may use of each of its devices; 0: not bounded."""
    device: str = ""
    """Device class, "cpu" or "cuda"."""
    load: float = 0.0
    """Cost of what is bound to it beyond the policies passed to `decide`."""

    def needed(self, policies: Iterable[Policy]) -> int:
        """Bytes on each device that `policies` need together: their states, each base once, and
        what one of them needs while it computes, since they take turns."""
        size, working = 0, 0
        bases: dict[str, int] = {}
        for one in policies:
            size += one.size
            working = max(working, one.working.get(self.worker_id, 0))
            bases[one.base] = max(bases.get(one.base, 0), one.base_size)
        return size + working + sum(bases.values())

    def has_room(self, policies: Iterable[Policy]) -> bool:
        """Whether `policies` fit into the memory together."""
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
    wanted: bool = True
    """Whether a step of it is open: then it takes a free device although it has no work yet."""
    ranks: int = 1
    """Number of workers in its gang."""
    size: int = 0
    """Bytes of its training state on each device of its gang, without `base`; 0: unknown."""
    base: str = ""
    """Name of the frozen weights under its adapter, which policies of a worker share."""
    base_size: int = 0
    """Bytes of these weights."""
    working: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it needs on each device besides while it computes, by worker."""
    device: str = ""
    """Device class that it needs; empty: any."""
    cost: float = 1.0
    """Relative load that it puts on a worker that holds several policies."""
    bound: tuple[str, ...] = ()
    """Workers that hold it, or to which it is being bound; empty: not bound."""
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
    idle: float | None = None
    """Overrides `BindingRules.idle`."""


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind `policy` to all of `workers`."""

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
    """Why no gang can hold a policy: each device needs `needed` bytes, those of the largest worker
    of its device class have `largest`."""

    policy: str
    needed: int
    largest: int


def too_large(policy: Policy, workers: Iterable[RankWorker]) -> TooLarge | None:
    """The reason why `policy` can never be bound to these workers; None if it can."""
    fitting = [worker for worker in workers if _suits(policy, worker)]
    if not fitting or any(worker.has_room([policy]) for worker in fitting):
        return None
    largest = max(fitting, key=lambda worker: worker.memory)
    return TooLarge(policy.policy, largest.needed([policy]), largest.memory)


def decide(
    rules: BindingRules, policies: Sequence[Policy], workers: Sequence[RankWorker], now: float
) -> BindingPlan:
    """The moves that are due. Independent of the order of the arguments.

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


def _wanted(policies: Iterable[Policy], workers: Iterable[RankWorker]) -> int:
    active = [one for one in policies if one.wanted or one.work]
    if not active:
        return 0
    # Workers with unbounded slots count one slot per rank: more of them are of use.
    slots = min((max(1, worker.slots) for worker in workers), default=1)
    return max(max(one.ranks for one in active), -(-sum(one.ranks for one in active) // slots))


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
            one.worker_id: WorkerPlan(one) for one in sorted(workers, key=lambda w: w.worker_id)
        }
        if len(self._policies) != len(policies) or len(self._plans) != len(workers):
            raise ValueError("two policies or two workers of one name")
        for one in self._policies.values():
            for worker_id in one.bound:
                if worker_id in self._plans:
                    self._plans[worker_id].held.append(one)
        self.moves: list[Move] = []
        # Policies suspended in this plan, with the policy that each makes room for.
        self._suspended: dict[str, str] = {}
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
            options = self._options(policy)
            ready = [plan for price, plan in options if price == 0]
            if len(ready) >= policy.ranks:
                self._bind(policy, ready[: policy.ranks])
                continue
            # Keep free what is free, what others are leaving, and what others are told to leave.
            chosen = [plan for _, plan in options][: policy.ranks]
            if len(chosen) < policy.ranks:
                continue  # too few workers: nothing is kept from the others
            for plan in chosen:
                self._make_room(policy, plan)
            if all(plan.can_take_over(policy, self._gone(plan)) for plan in chosen):
                self._bind(policy, chosen)
                continue
            for plan in chosen:
                plan.taken.append(policy)
            self._going[policy.policy] = tuple(sorted(plan.worker.worker_id for plan in chosen))

    def fill(self) -> None:
        """Bind policies with an open step but no work yet to places that would stay empty."""
        for policy in self._waiting(with_work=False):
            ready = [plan for price, plan in self._options(policy) if price == 0]
            if len(ready) >= policy.ranks:
                self._bind(policy, ready[: policy.ranks])

    def prefetch(self) -> None:
        """Prefetch the states of the policies that come next: one per worker."""
        busy = {w for one in self._policies.values() for w in one.prefetched if not one.bound}
        for policy in self._waiting(with_work=True):
            going = self._going.get(policy.policy, ())
            if policy.prefetched.issuperset(going) or busy.intersection(going):
                continue
            # Beside the state that computes there now, which leaves only when told to.
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
        """When time alone changes the plan: a quantum or an idle time ends."""
        times = [self._released_at(one) for one in self._policies.values() if self._idle(one)]
        if self._going:
            times += [
                self._left_alone_until(one)
                for one in self._policies.values()
                if one.bound and one.work and not one.leaving
            ]
        return min((time for time in times if time > self._now), default=math.inf)

    def _left_alone_until(self, policy: Policy) -> float:
        quantum = self._rules.quantum if policy.quantum is None else policy.quantum
        return policy.bound_at + quantum

    def _released_at(self, policy: Policy) -> float:
        return policy.since + (self._rules.idle if policy.idle is None else policy.idle)

    def _idle(self, policy: Policy) -> bool:
        resting = policy.bound or policy.near
        return bool(resting) and not (
            policy.wanted
            or policy.work
            or policy.busy
            or policy.leaving
            or policy.accumulating
            or policy.policy in self._suspended
        )

    def _options(self, policy: Policy) -> list[tuple[float, WorkerPlan]]:
        """Workers for `policy`, best first, each with a price: 0: free now; more: others must
        leave."""
        found = []
        for plan in self._plans.values():
            if not _suits(policy, plan.worker) or (who := self._leavers(policy, plan)) is None:
                continue
            worker_id = plan.worker.worker_id
            price = 0.0 if plan.free(policy) else max(map(self._price_of(policy), who), default=1)
            far = 0 if worker_id in policy.prefetched else 1 if worker_id in policy.near else 2
            harm = self._harm(price, who)
            found.append((price, harm, far, plan.load, worker_id, plan))
        return [(price, plan) for price, *_, plan in sorted(found, key=lambda one: one[:5])]

    def _harm(self, price: float, who: Sequence[Policy]) -> float:
        """Orders two ways to make room at the same price."""
        match price:
            case 2:
                return sum(one.accumulating for one in who)
            case 3:  # the youngest work is interrupted
                return -min(self._rank[one.policy] for one in who if one.work)
            case 4:  # wait for the quantum that ends first
                return max(map(self._left_alone_until, who))
            case _:
                return 0.0

    def _leavers(self, policy: Policy, plan: WorkerPlan) -> list[Policy] | None:
        """Policies that must leave for `policy` besides those that leave already: as few as
        possible, those without work first, then those with the youngest work. None: that is not
        enough."""
        gone = self._gone(plan)
        if plan.free(policy, gone):
            return []
        price = self._price_of(policy)
        victims = sorted(
            (one for one in plan.held if one.policy not in gone and price(one) < math.inf),
            key=lambda one: (price(one), one.accumulating, -self._rank[one.policy]),
        )
        for count, victim in enumerate(victims, 1):
            gone.append(victim.policy)
            if plan.free(policy, gone):
                return victims[:count]
        return None

    def _gone(self, plan: WorkerPlan) -> list[str]:
        """Policies that are leaving, or were suspended in this plan."""
        return [one.policy for one in plan.held if one.leaving or one.policy in self._suspended]

    def _price_of(self, policy: Policy) -> Callable[[Policy], float]:
        """Price at which another policy leaves for `policy`. 2: at once, without work; 3: at once,
        with younger work; 4: after its quantum, or when it can be suspended; inf: never."""

        def price(one: Policy) -> float:
            if one.work and _age(one) < _age(policy):
                return math.inf
            if one.busy:
                return 4
            if not one.work:
                return 2
            return 3 if self._now >= self._left_alone_until(one) else 4

        return price

    def _make_room(self, policy: Policy, plan: WorkerPlan) -> None:
        price = self._price_of(policy)
        for victim in self._leavers(policy, plan) or ():
            if price(victim) < 4:
                self._suspended[victim.policy] = policy.policy
                self.moves.append(Suspend(victim.policy, policy.policy))

    def _bind(self, policy: Policy, chosen: Sequence[WorkerPlan]) -> None:
        for plan in chosen:
            plan.taken.append(policy)
            plan.coming.append(policy)
        self.moves.append(
            Bind(policy.policy, tuple(sorted(plan.worker.worker_id for plan in chosen)))
        )


def _age(policy: Policy) -> tuple[float, float, str]:
    """Sort key, oldest first; of equals the costliest, which is hardest to place."""
    return (policy.since, -policy.cost, policy.policy)
