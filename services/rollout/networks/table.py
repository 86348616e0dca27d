"""Where episodes are played: an environment that can be stopped, and actors that have played it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.rollout.networks.engine import Served
from troupe.job import JobSpec
from troupe.networks.actor import Actor, Played, Seat
from troupe.networks.jobs import agents_of, close_environment
from troupe.networks.vector import Actions, Observed, Stepped, VectorEnvironment

# Actors that are kept. Of a population there are as many seatings as ways to put its slots to the
# table; to make one anew takes a moment.
_ACTORS: Final = 32
# Who plays which agents: (policy, agents), sorted.
Seating = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Play:
    """How policies play."""

    explore: bool
    """Whether anything is drawn at all."""
    earnest: tuple[str, ...] = ()
    """Policies that try nothing out: what they draw is what they have learned to draw."""


class Interrupted(Exception):
    """Nobody wants the episodes any more."""


class Interruptible:
    """An environment that stops between two steps when it is told to."""

    def __init__(self, environment: VectorEnvironment) -> None:
        self._environment = environment
        self.agents, self.spaces = environment.agents, environment.spaces
        self.copies = environment.copies
        self.stop = threading.Event()

    def reset(self, seed: int) -> Observed:
        """As the environment's. Raises `Interrupted`."""
        self._go_on()
        return self._environment.reset(seed)

    def step(self, actions: Actions) -> Stepped:
        """As the environment's. Raises `Interrupted`."""
        self._go_on()
        return self._environment.step(actions)

    def close(self) -> None:
        """As the environment's."""
        self._environment.close()

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise Interrupted


class Table:
    """An environment with the actors that have played it, one at a time."""

    def __init__(self, environment: Interruptible) -> None:
        self._environment = environment
        self._actors: dict[Seating, Actor] = {}
        # What each actor's policies play with.
        self._loaded: dict[Seating, dict[str, tuple[int, str]]] = {}

    def play(
        self,
        job: JobSpec,
        seating: Seating,
        served: Mapping[str, Served],
        seed: int,
        how: Play,
        stop: threading.Event,
    ) -> Played:
        """Raises `Interrupted` between two steps once `stop` is set, and whatever the environment
        raises."""
        self._environment.stop = stop
        actor, loaded = self._actors.pop(seating, None), self._loaded.pop(seating, {})
        if actor is None:
            actor = Actor(self._environment, _seats(job, self._environment.agents, seating))
        # The newest is the last.
        self._actors[seating], self._loaded[seating] = actor, loaded
        if len(self._actors) > _ACTORS:
            oldest = next(iter(self._actors))
            del self._actors[oldest], self._loaded[oldest]
        for policy, weights in served.items():
            version = (weights.version, weights.checksum)
            if loaded.get(policy) != version:
                actor.load(policy, weights.tensors, weights.version)
                loaded[policy] = version
        return actor.sample(seed, explore=how.explore, earnest=how.earnest)

    def close(self) -> None:
        """Give the environment up, whatever it raises."""
        close_environment(self._environment)


def _seats(job: JobSpec, agents: tuple[str, ...], seating: Seating) -> dict[str, Seat]:
    found = {}
    for policy, played in seating:
        network = job.policies[policy].network
        assert network is not None, "all policies of the job are networks"
        found[policy] = Seat(network, played, agents_of(job, agents, policy))
    return found
