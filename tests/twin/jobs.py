"""Small jobs for the twin."""

from __future__ import annotations

from typing import Any

from testbed.twin.cluster import PublishedJob
from testbed.twin.workload import DisturbedTeam
from troupe.scheduling.binding import RankWorker
from troupe.twin.costs import EngineRates, TrainerRates
from troupe.twin.job import EngineFleet, TwinJob, TwinPolicy
from troupe.twin.workload import Lengths, TeamWorkload, TwinTrajectory, TwinTurn

ENGINE = EngineRates(10_000.0, 0.02, 0.0005, load_seconds=0.5, start_seconds=2.0)
TRAINER = TrainerRates(20_000.0, 0.5, swap_seconds=0.3)


_TEAM: dict[str, Any] = {
    "agents": ("big", "small"),
    "rounds": Lengths(2.0, 0.4),
    "prompt": Lengths(100.0, 0.3),
    "response": Lengths(80.0, 0.6, 600),
    "wait": Lengths(0.5, 0.8),
    "group_size": 4,
}


def team(**more: Any) -> TeamWorkload:
    """Two agents with a tool."""
    return TeamWorkload(**_TEAM | more)


def disturbed_team(**more: Any) -> DisturbedTeam:
    """The same team, with environments that stall or break."""
    return DisturbedTeam(**_TEAM | more)


def constant(index: int) -> list[TwinTrajectory]:
    """Two trajectories of one turn: 1,000 tokens read, 100 drawn."""
    return [TwinTrajectory((TwinTurn("p", 1000, 100),))] * 2


def two_policies(**more: Any) -> TwinJob:
    """A team of two policies; with one trainer they take turns."""
    return TwinJob(**_two_policies(**more))


def published(**more: Any) -> PublishedJob:
    """The same job, with mechanisms that only published tables need."""
    return PublishedJob(**_two_policies(**more))


def _two_policies(*, trainers: int = 2, engines: int = 2, **more: Any) -> dict[str, Any]:
    one = TwinPolicy((EngineFleet(engines, ENGINE, limit=8),), TRAINER, state_bytes=1)
    workers = [RankWorker(f"t{n}", slots=1, device="cuda") for n in range(trainers)]
    defaults: dict[str, Any] = {
        "policies": {"big": one, "small": one},
        "trainers": workers,
        "workload": team(),
        "queries_per_step": 12,
        "micro_batch": 8,
        "in_flight": 16,
    }
    return defaults | more
