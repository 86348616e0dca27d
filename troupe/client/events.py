"""What `watch` yields: one small record per event of a job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from troupe.client.records import JobState, when
from troupe.rpc.errors import TroupeError
from troupe.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class StateChanged:
    """The job moved to `state`; `problem` says why it failed or what it waits for."""

    at: datetime
    state: JobState
    problem: TroupeError | None = None


@dataclass(frozen=True)
class MetricsLogged:
    """Metrics of a step; a step may log several times, under different names."""

    at: datetime
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Notice:
    """Something a person should know: a worker lost, a step skipped, a trajectory dropped."""

    at: datetime
    severity: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True)
class Activity:
    """Progress inside a step, `done` of `total`. Not kept: only who watches sees it."""

    at: datetime
    text: str
    step: int
    total_steps: int
    done: float
    total: float


Event = StateChanged | MetricsLogged | Notice | Activity

_SEVERITY: dict[int, Literal["info", "warning", "error"]] = {
    pb.Notice.SEVERITY_WARNING: "warning",
    pb.Notice.SEVERITY_ERROR: "error",
}


def event_of(event: pb.JobEvent) -> Event | None:
    """From the wire; None for a kind that this library does not know (a newer server)."""
    at = when(event.at)
    match event.WhichOneof("event"):
        case "state":
            problem = event.state.problem if event.state.HasField("problem") else None
            return StateChanged(
                at,
                JobState.of(event.state.state),
                TroupeError.from_problem(problem) if problem else None,
            )
        case "metrics":
            return MetricsLogged(at, event.metrics.step, dict(event.metrics.values))
        case "notice":
            return Notice(at, _SEVERITY.get(event.notice.severity, "info"), event.notice.text)
        case "activity":
            activity = event.activity
            return Activity(
                at,
                activity.text,
                activity.step,
                activity.total_steps,
                activity.done,
                activity.total,
            )
        case _:
            return None
