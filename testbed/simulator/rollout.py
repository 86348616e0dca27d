"""Trajectories that play a trace against an elastic pool or pods, calls that play one against model
services, and their waiting times."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from testbed.simulator.models import Dedicated, SharedPool
from testbed.simulator.trace import ServiceRequest, Trajectory
from testbed.twin.actions import ActionPool, ElasticPool, Pods


@dataclass
class BatchResult:
    """Times of one batch. `acts`: seconds from the request of an action to its end, in order of the
    ends; the wait for a pod is part of the first. `waited`: total seconds before actions began.
    `core_seconds`: cores held times seconds. `seconds`: until the last trajectory ended."""

    acts: list[float] = field(default_factory=list)
    waited: float = 0.0
    core_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def wait(self) -> float:
        """Mean seconds that an action waited before it began."""
        return self.waited / len(self.acts)

    @property
    def act(self) -> float:
        """Mean action completion time."""
        return sum(self.acts) / len(self.acts)


def play(
    trajectories: Sequence[Trajectory],
    make: Callable[[simpy.Environment], ElasticPool | Pods],
    *,
    held_by: int = 1,
) -> BatchResult:
    """Play all trajectories, which begin at once. `held_by`: number of neighbouring trajectories
    that keep their places (pods) until all of them have ended, as if a query's group is rewarded
    together.

    Raises ValueError if there are fewer pods than a group needs at once.
    """
    if held_by < 1:
        raise ValueError(f"held_by = {held_by}: must be at least 1")
    groups = [
        _Group(min(held_by, len(trajectories) - first))
        for first in range(0, len(trajectories), held_by)
    ]
    env, played = simpy.Environment(), BatchResult()
    pool = make(env)
    for index, trajectory in enumerate(trajectories):
        group = groups[index // held_by]
        env.process(_one(env, pool, (f"{index}", trajectory), played, group))
    env.run()
    if any(len(one.places) < one.size for one in groups):
        raise ValueError(f"held_by = {held_by}: fewer pods than trajectories that keep them")
    played.seconds = float(env.now)
    played.waited, played.core_seconds = pool.waited, pool.core_seconds
    return played


@dataclass
class _Group:
    """Trajectories that free their places together: their number, and the places of the ended
    ones."""

    size: int
    places: list[Any] = field(default_factory=list)


def _one(
    env: simpy.Environment,
    pool: ActionPool,
    named: tuple[str, Trajectory],
    played: BatchResult,
    group: _Group,
) -> Generator[simpy.Event, Any, None]:
    name, trajectory = named
    asked = env.now
    place = yield from pool.enter()
    waited = env.now - asked
    for turn in trajectory:
        yield env.timeout(turn.think)
        asked = env.now
        yield from pool.run(turn.call, place, name)
        played.acts.append(waited + env.now - asked)
        waited = 0.0
    group.places.append(place)
    if len(group.places) == group.size:
        for held in group.places:
            pool.leave(held)


def ask(
    calls: Sequence[ServiceRequest],
    names: Sequence[str],
    make: Callable[[simpy.Environment], Dedicated | SharedPool],
) -> BatchResult:
    """Play every call at its time, on the service with its index in `names`."""
    env, played = simpy.Environment(), BatchResult()
    pool = make(env)

    def one(call: ServiceRequest) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(call.at)
        yield from pool.run(names[call.service], call.seconds)
        played.acts.append(env.now - call.at)

    for call in calls:
        env.process(one(call))
    env.run()
    played.seconds = float(env.now)
    return played
