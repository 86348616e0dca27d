"""Records of a job's events, as `JobHandle.watch` yields them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, Self

from troupe.client.conversion import Record, when, word
from troupe.client.records.jobs import JobState
from troupe.rpc.errors import TroupeError
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


@dataclass(frozen=True)
class StateChanged(Record):
    """The job moved to `state`; `problem` is why it failed, or what it waits for."""

    at: datetime
    state: JobState
    problem: TroupeError | None = None

    def __str__(self) -> str:
        why = f": {self.problem}" if self.problem else ""
        return _line(self.at, f"the job {self.state.clause}{why}")


@dataclass(frozen=True)
class MetricsLogged(Record):
    """Metrics of a step; a step may log several times, under different names."""

    at: datetime
    step: int
    values: dict[str, float]

    def __str__(self) -> str:
        # Rewards first; short names before their parts.
        names = sorted(self.values, key=lambda name: ("reward" not in name, len(name), name))
        shown = " ".join(f"{name}={self.values[name]:.4g}" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return _line(self.at, f"step {self.step}: {shown}{more}")


@dataclass(frozen=True)
class Notice(Record):
    """A message for people: a worker was lost, a step skipped, a trajectory dropped."""

    at: datetime
    severity: Literal["info", "warning", "error"]
    text: str

    def __str__(self) -> str:
        return _line(self.at, f"{self.severity}: {self.text}")

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        severity = word(orchestrator_pb.Notice.Severity.DESCRIPTOR, message.severity) or "info"
        return super().of(message, severity=severity, **given)


@dataclass(frozen=True)
class Activity(Record):
    """Progress inside a step, `done` of `total`. It is not logged: only live watchers get it."""

    at: datetime
    text: str
    step: int
    total_steps: int
    done: float
    total: float

    def __str__(self) -> str:
        amount = f"{self.done:g} of {self.total:g}"
        # Most texts have the numbers, too.
        told = self.total <= 0 or amount in self.text
        text = self.text if told else f"{self.text} ({amount})"
        step = f"step {self.step} of {self.total_steps}: "
        return _line(self.at, text if text.startswith("step ") else step + text)


# The metrics that the text of an event shows.
_SHOWN: Final = 6


def _line(at: datetime, text: str) -> str:
    return f"{at.astimezone():%H:%M:%S} {' '.join(text.split())}"


Event = StateChanged | MetricsLogged | Notice | Activity


def event_of(message: orchestrator_pb.JobEvent) -> Event | None:
    """Return the record of an event; None for a kind that only a newer server knows."""
    at = when(message.at)
    match message.WhichOneof("event"):
        case "state":
            return StateChanged.of(message.state, at=at)
        case "metrics":
            return MetricsLogged.of(message.metrics, at=at)
        case "notice":
            return Notice.of(message.notice, at=at)
        case "activity":
            return Activity.of(message.activity, at=at)
        case _:
            return None
