"""Which policies hold training devices: bound while they have work, suspended while others need it.

FlexMARL, section 4 (arXiv 2602.09578), "agent-centric resource allocation". `decide` is a pure
function of who has work and where everything is; it says what to do next and is asked again when
something has changed. Its rules:

* *A gang or nothing*: a policy gets all the workers that it needs at one stroke.
* *Oldest work first*, and so nobody starves: whoever works on younger work gives way once it has
  had its quantum; what the oldest waits for is kept free for it.
* *Nobody without work keeps a device from one that has some*; but a policy stays bound until then.
* *State moves rarely*: a policy goes where its state is, if there is room, and the state of the
  one that is next is brought while the present one computes.
* *Devices do not wait for who leaves*: a policy whose state was brought already takes the place of
  one that is leaving at once, and computes while that one's state moves out, if both find room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Seats:
    """One worker while a plan is made."""

    worker: RankWorker
    held: list[Policy] = field(default_factory=list)
    # Taken or kept free in this plan: (bytes, cost) each.
    taken: list[tuple[float, float]] = field(default_factory=list)
    # Bound in this plan.
    coming: list[Policy] = field(default_factory=list)

    def free(self, policy: Policy, gone: Iterable[str] = ()) -> bool:
        """Whether `policy` has a slot and memory here once those of `gone` have left."""
        worker, names = self.worker, set(gone)
        stay = [one for one in self.held if one.policy not in names]
        if worker.slots and len(stay) + len(self.taken) >= worker.slots:
            return False
        used = sum(one.share for one in stay) + sum(size for size, _ in self.taken)
        return not worker.memory or used + policy.share <= worker.memory

    def hands_over(self, policy: Policy, gone: Iterable[str]) -> bool:
        """Whether `policy` may come while those of `gone` still leave: its state is there."""
        if self.worker.worker_id not in policy.prefetched or not self.free(policy, gone):
            return False
        return self.room_beside(policy)

    def room_beside(self, policy: Policy) -> bool:
        """Whether its state has room next to all others that are here, or come in this plan."""
        if not self.worker.memory:
            return True
        if not policy.size:  # it was bound nowhere yet: what it takes shows when it is loaded
            return not (self.held or self.coming)
        used = sum(one.share for one in (*self.held, *self.coming))
        return used + policy.share <= self.worker.memory

    @property
    def load(self) -> float:
        """What it has to do already."""
        held = sum(one.cost for one in self.held)
        return self.worker.load + held + sum(cost for _, cost in self.taken)


@dataclass(frozen=True, slots=True)
class BindingRules:
    """Times are seconds of the caller's clock."""

    quantum: float = 1.0
    """A policy with work is left alone so long after it was bound: a swap must pay."""
    idle: float = math.inf
    """A policy whose step is over is released after so long without another."""


@dataclass(frozen=True, slots=True)
class RankWorker:
    """One trainer worker: a rank of the gangs that it belongs to."""

    worker_id: str
    slots: int = 0
    """Policies that it may hold at once; 0: any number."""
    memory: int = 0
    """Bytes of training state that its device holds; 0: not bounded."""
    device: str = ""
    """Device class, "cpu" or "cuda"."""
    load: float = 0.0
    """What is bound to it that `decide` is not told of, in costs of policies."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What one policy needs and where it is."""

    policy: str
    work: int = 0
    """Micro-batches that could be computed now; an optimizer step that is due counts as one."""
    since: float = 0.0
    """When the oldest of them became ready; without work: when it was bound or asked for."""
    wanted: bool = True
    """Whether a step of it is open: then it takes a free device although it has no work yet."""
    ranks: int = 1
    """Workers that its gang consists of."""
    size: int = 0
    """Bytes of its training state over all ranks; 0: not known."""
    device: str = ""
    """Device class that it asks for; empty: any."""
    cost: float = 1.0
    """What it costs a worker that holds several, relative to others."""
    bound: tuple[str, ...] = ()
    """The workers that hold it, or that it is being bound to; nobody holds it: empty."""
    bound_at: float = 0.0
    busy: bool = False
    """It cannot be suspended now: it is being bound, steps, or publishes."""
    leaving: bool = False
    """It is being suspended or released: its places are about to be free."""
    accumulating: bool = False
    """Gradients of a step have accumulated, which a release would lose."""
    near: frozenset[str] = frozenset()
    """Workers on whose host its state is, or that hold it from before."""
    prefetched: frozenset[str] = frozenset()
    """Workers that have its state ready."""
    barred: frozenset[str] = frozenset()
    """Workers that it is not bound to."""
    quantum: float | None = None
    """Instead of `BindingRules.quantum`."""
    idle: float | None = None
    """Instead of `BindingRules.idle`."""

    @property
    def share(self) -> float:
        """Bytes of its state on each worker of its gang."""
        return self.size / self.ranks


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind `policy` to `workers`, all of them."""

    policy: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suspend:
    """Take the training state of `policy` off its devices; `after` is who needs them."""

    policy: str
    after: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the state of `policy` to where it will be bound next."""

    policy: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Give the devices of `policy` back; its committed state is on disk."""

    policy: str


Move = Bind | Suspend | Prefetch | Release


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """What to do now, in this order; and when to ask again if nothing happens before."""

    moves: tuple[Move, ...] = ()
    again: float = math.inf
    wanted: int = 0
    """Workers with which no policy that has a step open would wait for another; 0: nobody needs
    any, and a deployment may scale to zero."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """No gang can ever hold a policy: each of its ranks needs `needed` bytes, the largest worker
    of its device class has `largest`."""

    policy: str
    needed: int
    largest: int


def too_large(policy: Policy, workers: Iterable[RankWorker]) -> TooLarge | None:
    """Why `policy` can be bound to none of these workers, however long it waits; else None."""
    fitting = [worker.memory for worker in workers if _suits(policy, worker)]
    if not fitting or any(not memory or policy.share <= memory for memory in fitting):
        return None
    return TooLarge(policy.policy, math.ceil(policy.share), max(fitting))


def decide(
    rules: BindingRules, policies: Sequence[Policy], workers: Sequence[RankWorker], now: float
) -> BindingPlan:
    """The moves that are due. The same for the same arguments, in whatever order they come.

    A policy that `too_large` refuses is left out. Raises ValueError for two of one name.
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
    # Workers that bound nothing are wanted one for each rank: more of them are of use.
    slots = min((max(1, worker.slots) for worker in workers), default=1)
    return max(max(one.ranks for one in active), -(-sum(one.ranks for one in active) // slots))


class _Table:
    """The moves of one plan as they are found."""

    def __init__(
        self,
        rules: BindingRules,
        policies: Sequence[Policy],
        workers: Sequence[RankWorker],
        now: float,
    ) -> None:
        self._rules, self._now = rules, now
        self._policies = {one.policy: one for one in sorted(policies, key=_age)}
        # The oldest is 0.
        self._rank = {name: rank for rank, name in enumerate(self._policies)}
        self._seats = {
            one.worker_id: Seats(one) for one in sorted(workers, key=lambda w: w.worker_id)
        }
        if len(self._policies) != len(policies) or len(self._seats) != len(workers):
            raise ValueError("two policies or two workers of one name")
        for one in self._policies.values():
            for worker_id in one.bound:
                if worker_id in self._seats:
                    self._seats[worker_id].held.append(one)
        self.moves: list[Move] = []
        # Who is told to leave in this plan, and for whom.
        self._suspended: dict[str, str] = {}
        # Where each policy that waits will go.
        self._going: dict[str, tuple[str, ...]] = {}

    def _waiting(self, *, with_work: bool) -> list[Policy]:
        return [
            one
            for one in self._policies.values()
            if not one.bound
            and not one.leaving
            and (one.work > 0 if with_work else one.wanted and one.work == 0)
            and too_large(one, (seats.worker for seats in self._seats.values())) is None
        ]

    def place(self) -> None:
        """Bind who has work, the oldest first, and have others make room."""
        for policy in self._waiting(with_work=True):
            options = self._options(policy)
            ready = [seats for price, seats in options if price == 0]
            if len(ready) >= policy.ranks:
                self._bind(policy, ready[: policy.ranks])
                continue
            # Kept free: what is there, what others are leaving, what they are told to leave.
            chosen = [seats for _, seats in options][: policy.ranks]
            if len(chosen) < policy.ranks:
                continue  # there are not so many workers: nothing is kept from the others
            for seats in chosen:
                self._make_room(policy, seats)
            if all(seats.hands_over(policy, self._gone(seats)) for seats in chosen):
                self._bind(policy, chosen)
                continue
            for seats in chosen:
                seats.taken.append((policy.share, policy.cost))
            self._going[policy.policy] = tuple(sorted(seats.worker.worker_id for seats in chosen))

    def fill(self) -> None:
        """Bind who has a step open but no work yet, where a place would be empty otherwise."""
        for policy in self._waiting(with_work=False):
            ready = [seats for price, seats in self._options(policy) if price == 0]
            if len(ready) >= policy.ranks:
                self._bind(policy, ready[: policy.ranks])

    def prefetch(self) -> None:
        """Bring the states of those that come next: one to each worker."""
        busy = {w for one in self._policies.values() for w in one.prefetched if not one.bound}
        for policy in self._waiting(with_work=True):
            going = self._going.get(policy.policy, ())
            if policy.prefetched.issuperset(going) or busy.intersection(going):
                continue
            # Next to what computes there now, which leaves only when it is told to.
            if any(not self._seats[w].room_beside(policy) for w in going):
                continue
            busy.update(going)
            self.moves.append(Prefetch(policy.policy, going))

    def release(self) -> None:
        """Scale to zero what has been idle for long."""
        for policy in self._policies.values():
            if self._idle(policy) and self._now >= self._released_at(policy):
                self.moves.append(Release(policy.policy))

    def again(self) -> float:
        """When the clock alone changes the plan: a quantum or an idle time ends."""
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

    def _options(self, policy: Policy) -> list[tuple[float, Seats]]:
        """Workers that `policy` can go to, the best first; 0: now, more: when others have left."""
        found = []
        for seats in self._seats.values():
            if not _suits(policy, seats.worker) or (who := self._leavers(policy, seats)) is None:
                continue
            worker_id = seats.worker.worker_id
            price = 0.0 if seats.free(policy) else max(map(self._price_of(policy), who), default=1)
            far = 0 if worker_id in policy.prefetched else 1 if worker_id in policy.near else 2
            harm = self._harm(price, who)
            found.append((price, harm, far, seats.load, worker_id, seats))
        return [(price, seats) for price, *_, seats in sorted(found, key=lambda one: one[:5])]

    def _harm(self, price: float, who: Sequence[Policy]) -> float:
        """Of two ways to make room the one with less is taken."""
        match price:
            case 2:
                return sum(one.accumulating for one in who)
            case 3:  # the youngest work is disturbed
                return -min(self._rank[one.policy] for one in who if one.work)
            case 4:  # the quantum that ends first is awaited
                return max(map(self._left_alone_until, who))
            case _:
                return 0.0

    def _leavers(self, policy: Policy, seats: Seats) -> list[Policy] | None:
        """Who has to leave for `policy`, besides those that do already: as few as it takes, those
        without work first, of those with work the youngest. None: no one's leaving is enough."""
        gone = self._gone(seats)
        if seats.free(policy, gone):
            return []
        price = self._price_of(policy)
        victims = sorted(
            (one for one in seats.held if one.policy not in gone and price(one) < math.inf),
            key=lambda one: (price(one), one.accumulating, -self._rank[one.policy]),
        )
        for count, victim in enumerate(victims, 1):
            gone.append(victim.policy)
            if seats.free(policy, gone):
                return victims[:count]
        return None

    def _gone(self, seats: Seats) -> list[str]:
        """Who is leaving, or was told to in this plan."""
        return [one.policy for one in seats.held if one.leaving or one.policy in self._suspended]

    def _price_of(self, policy: Policy) -> Callable[[Policy], float]:
        """At what price somebody leaves for `policy`. 2: at once, it has no work; 3: at once, its
        work is younger; 4: when its quantum is over, or it can be suspended; inf: never."""

        def price(one: Policy) -> float:
            if one.work and _age(one) < _age(policy):
                return math.inf
            if one.busy:
                return 4
            if not one.work:
                return 2
            return 3 if self._now >= self._left_alone_until(one) else 4

        return price

    def _make_room(self, policy: Policy, seats: Seats) -> None:
        price = self._price_of(policy)
        for victim in self._leavers(policy, seats) or ():
            if price(victim) < 4:
                self._suspended[victim.policy] = policy.policy
                self.moves.append(Suspend(victim.policy, policy.policy))

    def _bind(self, policy: Policy, chosen: Sequence[Seats]) -> None:
        for seats in chosen:
            seats.taken.append((policy.share, policy.cost))
            seats.coming.append(policy)
        self.moves.append(
            Bind(policy.policy, tuple(sorted(seats.worker.worker_id for seats in chosen)))
        )


def _age(policy: Policy) -> tuple[float, float, str]:
    """Sorts the oldest first; of equals the costliest, which is harder to place."""
    return (policy.since, -policy.cost, policy.policy)
