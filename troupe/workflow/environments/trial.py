"""An environment on trial: what `conformance`'s checks share."""

from __future__ import annotations

from dataclasses import dataclass, field

from troupe.workflow.environments.interface import Environment, EnvironmentFactory, Properties
from troupe.workflow.environments.playing import Mover, Record, play_randomly

TOLERANCE = 1e-6
"""Rewards that differ by less are equal."""


class Broken(Exception):
    """A promise that is not kept."""


class Inapplicable(Exception):
    """The environment does not promise it."""


@dataclass
class Trial:
    """One environment on trial, and episodes of it that were played already."""

    make: EnvironmentFactory
    seeds: tuple[int, ...]
    move: Mover
    name: str = "environment"
    records: dict[int, Record] = field(default_factory=dict)
    properties: Properties | None = None

    @property
    def declared(self) -> Properties:
        """What it declares."""
        assert self.properties is not None, "the check `interface` comes first"
        return self.properties

    def new(self) -> Environment:
        """Another object."""
        return self.make()

    def record(self, seed: int) -> Record:
        """The episode of a seed, played once, on an object of its own."""
        if seed not in self.records:
            environment = self.new()
            try:
                self.records[seed] = play_randomly(environment, seed, self.move)
            finally:
                environment.close()
        return self.records[seed]

    def all(self) -> list[Record]:
        """The episodes of all seeds."""
        return [self.record(seed) for seed in self.seeds]
