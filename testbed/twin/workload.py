"""Workloads of published tables: kinds of queries in turn, environments that stall and break."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.twin.faults import FailingTrajectory
from troupe.twin.workload import TeamWorkload, TwinTrajectory, TwinTurn, Workload


@dataclass(frozen=True)
class DisturbedTeam(TeamWorkload):
    """A team whose environments stall and break."""

    faults: float = 0.0
    """Share of trajectories whose environment fails once."""
    stalls: float = 0.0
    stall_seconds: float = 0.0
    """In a share `stalls` of trajectories one wait takes `stall_seconds` longer."""

    def _finished(self, rng: random.Random, turns: list[TwinTurn]) -> TwinTrajectory:
        if self.stalls and rng.random() < self.stalls:
            turns[rng.randrange(len(turns))].after += self.stall_seconds
        fails = bool(self.faults) and rng.random() < self.faults
        kind = FailingTrajectory if fails else TwinTrajectory
        return kind(tuple(turns), self.reset.draw(rng))


class MixedWorkload:
    """Queries of several kinds in turn: `parts` are (workload, share of the queries)."""

    def __init__(self, parts: Sequence[tuple[Workload, float]]) -> None:
        """Raises ValueError unless the shares are positive."""
        total = sum(share for _, share in parts)
        if total <= 0 or any(share < 0 for _, share in parts):
            raise ValueError(f"parts = {[share for _, share in parts]}: shares must be positive")
        self._parts = [(workload, share / total) for workload, share in parts]

    def __call__(self, index: int) -> Sequence[TwinTrajectory]:
        """Return the trajectories of a query; neighbouring queries are of different kinds."""
        # Golden-ratio sequence: every run of queries has about the same shares as all queries.
        at = (index + 1) * 0.6180339887498949 % 1.0
        for workload, share in self._parts:
            if at < share:
                return workload(index)
            at -= share
        return self._parts[-1][0](index)
