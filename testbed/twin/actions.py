"""Actions of environments in the twin: a shared elastic pool, or a pod for each trajectory.

`ElasticPool` runs actions with the times, hosts and numbers of cores that
`troupe.scheduling.elastic` decides. `Pods` are the baseline: cores that a trajectory reserves for
its life (static Kubernetes). A trajectory enters a pool, runs its actions there, and leaves.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import simpy

from troupe.scheduling.elastic import (
    Action,
    Amounts,
    DecisionBounds,
    Discipline,
    Host,
    Kin,
    Placed,
    Running,
    SpeedUp,
    decide_over,
    turn,
)
from troupe.twin.workload import TwinTurn

CORES: Final = "cores"
REWARD: Final = "reward"
"""The function of a trajectory's last action."""

Process: TypeAlias = Generator[simpy.Event, Any, None]
Decide: TypeAlias = Callable[..., list[Placed]]


@dataclass(frozen=True, slots=True)
class SimulatedAction:
    """An action with its true duration: `serial + parallel / m` seconds with m cores, of which it
    can use from `cores` to `max_cores`. The scheduler does not know this duration, but it knows the
    action's query, and whether it shares its arguments (`content`; empty: it does not)."""

    function: str
    cores: int
    max_cores: int
    serial: float
    parallel: float
    query: str = ""
    content: str = ""

    def seconds(self, cores: int) -> float:
        """Return the seconds of the action with `cores` cores."""
        return self.serial + self.parallel / max(1, min(cores, self.max_cores))


class ActingTurn(TwinTurn):
    """A turn after which `call` runs in the job's pool of actions, before `after` passes."""

    __slots__ = ("call",)

    def __init__(
        self,
        policy: str,
        prompt: int,
        response: int,
        *,
        call: SimulatedAction,
        after: float = 0.0,
        shared: int = 0,
    ) -> None:
        super().__init__(policy, prompt, response, after, shared)
        self.call = call


class ActionPool(Protocol):
    """A pool in which trajectories run their actions. `interrupt` of a waiting or running process
    frees its resources."""

    core_seconds: float
    """Cores times seconds that actions held while they ran."""
    waited: float
    """Seconds that all actions waited before they began, or all trajectories for a pod."""

    def enter(self) -> Generator[simpy.Event, Any, Any]:
        """Wait for the trajectory's own place, if the pool has such places, and return it."""

    def run(
        self, call: SimulatedAction, place: Any = None, trajectory: str = ""
    ) -> Generator[simpy.Event, Any, Any]:
        """Run one action of a trajectory that has this place."""

    def leave(self, place: Any) -> None:
        """Free the place of a trajectory that has ended."""


@dataclass(slots=True)
class _Machine:
    """A host's free cores and running actions."""

    name: str
    capacity: Amounts
    free: dict[str, int]
    running: dict[str, Running] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    homes: int = 0

    def seen(self) -> Host:
        return Host(
            self.name, self.free, self.running.values(), self.functions, capacity=self.capacity
        )


@dataclass
class Learned:
    """Learned durations of functions and trajectories; can be handed to the next pool."""

    discipline: Discipline = field(default_factory=Discipline)
    curves: dict[str, SpeedUp] = field(default_factory=dict)


@dataclass(slots=True)
class _Waiting:
    call: SimulatedAction
    started: simpy.Event


class ElasticPool:
    """An elastic pool, which runs each call once and learns durations of functions like the reward
    service."""

    def __init__(
        self,
        env: simpy.Environment,
        hosts: Sequence[Amounts],
        *,
        rules: DecisionBounds = DecisionBounds(),  # noqa: B008 (frozen)
        fixed: int | None = None,
        fractions: Mapping[str, float] | None = None,
        learned: Learned | None = None,
        told: bool = False,
        stateful: bool = True,
        decide: Decide = decide_over,
    ) -> None:
        """`hosts`: the capacity of each. `stateful`: a trajectory's actions stay on its host, where
        its files are. `fixed`: exact number of cores of every elastic action. `fractions`: the
        parallel parts that functions declare. `told`: an action's duration is known at its request
        (the services' `expected_seconds`).
        `decide`: replaces the decision function, to observe it."""
        self._env = env
        self._machines = {
            str(i): _Machine(str(i), capacity, dict(capacity)) for i, capacity in enumerate(hosts)
        }
        self._rules = rules
        self._fixed = fixed
        self._fractions = dict(fractions or {})
        learned = learned or Learned()
        self._discipline, self._curves = learned.discipline, learned.curves
        self._told = told
        self._stateful = stateful
        self._decide = decide
        # Function -> its action that tries a new number of cores.
        self._exploring: dict[str, str] = {}
        self._levels: dict[tuple[int, int], tuple[int, ...]] = {}
        # In the order of `turn`.
        self._queue: list[Action] = []
        self._kinds: Counter[str] = Counter()
        self._waiting: dict[str, _Waiting] = {}
        self._count = 0
        self._pumping = False
        self.core_seconds = 0.0
        # Of all actions, from their request to their start.
        self.waited = 0.0

    def enter(self) -> Generator[simpy.Event, Any, str | None]:
        """Return the host for one more trajectory: the one with the fewest trajectories per
        core."""
        if not self._stateful:
            return None
        machine = min(self._machines.values(), key=lambda m: m.homes / m.capacity[CORES])
        machine.homes += 1
        return machine.name
        yield  # without a wait

    def leave(self, place: str | None) -> None:
        """Remove an ended trajectory."""
        if place is not None:
            self._machines[place].homes -= 1

    def run(
        self, call: SimulatedAction, place: str | None = None, trajectory: str = ""
    ) -> Generator[simpy.Event, Any, str]:
        """Wait until the action is admitted, then run it; return its host. `place`: the only host
        on which it may run."""
        started = self._env.event()
        action = self._action(call, place, trajectory)
        self._waiting[action.action_id] = _Waiting(call, started)
        bisect.insort(self._queue, action, key=turn)
        self._kinds[action.kind] += 1
        # Otherwise it waits behind an action that waits for the same resource.
        if self._kinds[action.kind] == 1 or self._queue[0] is action:
            self._pump()
        try:
            placed: Placed = yield started
        except simpy.Interrupt:
            self._cancel(action, started)
            raise
        self.waited += self._env.now - action.since
        cores, before = placed.holds.get(CORES, 0), self._curve(call)
        seconds = call.seconds(cores)
        try:
            yield self._env.timeout(seconds)
        except simpy.Interrupt:
            self._free(placed)
            raise
        self._free(placed)
        self.core_seconds += seconds * cores
        held, function, last = max(1, cores), call.function, call.function == REWARD
        # Its estimated time on the fewest cores.
        alone, given = before.seconds((max(1, call.cores), held))
        declared = call.seconds(call.cores) if self._told else 0.0
        kin = _kin(call, trajectory)
        self._discipline.took(function, kin, seconds * alone / given, declared=declared)
        self._curves[function] = self._curve(call).observed(held, seconds)
        self._discipline.ran("", trajectory, seconds * held, last=last, function=function)
        return placed.host

    def _cancel(self, action: Action, started: simpy.Event) -> None:
        """Remove an action that its trajectory no longer wants."""
        if started.triggered:  # at this instant
            placed: Any = started.value
            self._free(placed)
            return
        del self._waiting[action.action_id]
        self._queue.remove(action)
        self._explored(action)
        self._kinds[action.kind] -= 1
        self._pump()

    def _explored(self, action: Action) -> None:
        if self._exploring.get(action.function) == action.action_id:
            del self._exploring[action.function]

    def _free(self, placed: Placed) -> None:
        machine = self._machines[placed.host]
        del machine.running[placed.action.action_id]
        for resource, amount in placed.holds.items():
            machine.free[resource] += amount
        self._explored(placed.action)
        self._pump()

    def _action(self, call: SimulatedAction, host: str | None, trajectory: str) -> Action:
        self._count += 1
        action_id, function = f"{self._count:09}", call.function
        curve = self._curve(call)
        lowest, highest = call.cores, call.max_cores
        if self._fixed is not None:
            lowest = highest = min(self._fixed, highest)
        average = curve.seconds((max(1, lowest),))[0]
        declared = call.seconds(lowest) if self._told else 0.0
        kin = _kin(call, trajectory)
        seconds = self._discipline.expected(function, kin, average, declared=declared)
        work, last = seconds * max(1, lowest), function == REWARD
        now, elastic, needs = self._env.now, None, {CORES: lowest}
        place = self._discipline.place(now, "", trajectory, work, last=last, query=call.query)
        if highest > lowest:
            levels = self._levels.setdefault((lowest, highest), tuple(range(lowest, highest + 1)))
            known = seconds if seconds != average else 0.0
            hosts = self._machines.values() if host is None else [self._machines[host]]
            most = max(machine.capacity[CORES] for machine in hosts)
            explore = function not in self._exploring
            elastic = curve.elastic(
                CORES, levels, self._count, lowest=known, most=most, explore=explore
            )
            if len(elastic.levels) < len(levels):
                self._exploring[function] = action_id
            needs = {}
        return Action(action_id, now, needs, elastic, seconds, function, host, place)

    def _curve(self, call: SimulatedAction) -> SpeedUp:
        known = self._curves.get(call.function)
        if known is None:
            fraction = self._fractions.get(call.function, 0.0)
            known = self._curves[call.function] = SpeedUp(fraction)
        return known

    def _pump(self) -> None:
        """Schedule a decision after all events of this instant."""
        if not self._pumping:
            self._pumping = True
            self._env.timeout(0).callbacks.append(lambda _: self._start())

    def _start(self) -> None:
        self._pumping = False
        if not self._queue:
            return
        hosts = [machine.seen() for machine in self._machines.values()]
        grants = self._decide(hosts, self._queue, self._env.now, self._rules)
        started = {grant.action.action_id for grant in grants}
        if started:
            self._queue = [a for a in self._queue if a.action_id not in started]
        for grant in grants:
            action = grant.action
            self._kinds[action.kind] -= 1
            machine = self._machines[grant.host]
            machine.running[action.action_id] = Running(grant.holds, self._env.now + grant.seconds)
            machine.functions.add(action.function)
            for resource, amount in grant.holds.items():
                machine.free[resource] -= amount
            self._waiting.pop(action.action_id).started.succeed(grant)


def _kin(call: SimulatedAction, trajectory: str) -> Kin:
    return Kin(call.query, trajectory, call.content)


class Pods:
    """Pods of `cores` cores on hosts; the control plane creates a limited number per second.

    A trajectory waits for its own pod (first come, first served), holds all of its cores until it
    ends, and runs every action in it, with the parallelism of its image.
    """

    def __init__(
        self,
        env: simpy.Environment,
        hosts: Sequence[Amounts],
        *,
        cores: int,
        parallelism: int | None = None,
        start_seconds: float = 0.0,
        made_per_second: float = float("inf"),
    ) -> None:
        """`parallelism`: cores of the pod that an action uses; None: all. `start_seconds`: from
        creation to readiness. Raises ValueError if no pod fits."""
        places = sum(host[CORES] // cores for host in hosts)
        if not places:
            raise ValueError(f"cores = {cores}: no host has that many")
        self._env = env
        self._cores = min(cores, parallelism or cores)
        self._start_seconds = start_seconds
        self._interval = 1.0 / made_per_second
        self._next = 0.0
        self._places = simpy.Resource(env, places)
        self.core_seconds = 0.0
        # Total wait of all trajectories for their pods.
        self.waited = 0.0

    def enter(self) -> Generator[simpy.Event, Any, simpy.Event]:
        """Wait for a pod and return it."""
        asked = self._env.now
        request = self._places.request()
        try:
            yield request
            made = self._next = max(self._next, self._env.now) + self._interval
            yield self._env.timeout(made - self._env.now + self._start_seconds)
        except simpy.Interrupt:
            request.cancel()
            self._places.release(request)
            raise
        self.waited += self._env.now - asked
        return request

    def leave(self, place: Any) -> None:
        """Free the pod of an ended trajectory."""
        self._places.release(place)

    def run(
        self, call: SimulatedAction, place: Any = None, trajectory: str = ""
    ) -> Generator[simpy.Event, Any, None]:
        """Run one action in a pod."""
        seconds = call.seconds(self._cores)
        yield self._env.timeout(seconds)
        self.core_seconds += seconds * min(self._cores, call.max_cores)
