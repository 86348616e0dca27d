"""Records of jobs, their versions, conversations and results, and the errors of failed jobs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from troupe import states
from troupe.client.conversion import Record
from troupe.contracts.metric_names import SIGNAL_STEPS
from troupe.rpc.errors import FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


class JobState(StrEnum):
    """The states of a job; `troupe.states.JOB` has the allowed transitions."""

    UNSPECIFIED = "unspecified"
    SUBMITTED = "submitted"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def number(self) -> int:
        """The state's number in the protocol."""
        return int(common_pb.JobState.Value(f"JOB_STATE_{self.upper()}"))

    @property
    def ended(self) -> bool:
        """Whether the job has succeeded, failed or been cancelled; it may still be resumable."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def clause(self) -> str:
        """The predicate of a sentence about the job: "is running", "has succeeded"."""
        verb = "has" if self in (JobState.SUCCEEDED, JobState.FAILED) else "is"
        return f"{verb} {self}"

    @property
    def resumable(self) -> bool:
        """Whether the job can be resumed; one that has succeeded needs more steps."""
        return states.allowed(states.JOB, self.number, common_pb.JOB_STATE_SUBMITTED)


@dataclass(frozen=True)
class ResolvedSetting(Record):
    """A setting that the job may leave open, with the value that a worker chose."""

    field: str
    value: str
    # Where the value comes from: "given", "checkpoint", or the class of the device.
    source: str


@dataclass(frozen=True)
class PolicyOrigin(Record):
    """The origin of a policy's first weights (`init_from`)."""

    # The policy of another job, and its version; empty and None for a checkpoint of unknown origin.
    job_id: str
    policy: str
    version: int | None
    # Where the checkpoint is, or was fetched from.
    path: str
    # Whether the optimizer's state came along.
    optimizer: bool

    def __str__(self) -> str:
        what = "weights and optimizer" if self.optimizer else "weights"
        source = f"{self.job_id}/{self.policy}@{self.version}" if self.job_id else self.path
        return f"{what} of {source}"


@dataclass(frozen=True)
class FieldChange(Record):
    """The values of a field before and after a change, as JSON; empty: there is none."""

    field: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.field}: {self.old or 'none'} -> {self.new or 'none'}"


@dataclass(frozen=True)
class JobChange(Record):
    """A change of a job's specification by a resume."""

    at: datetime
    # Steps that were done: the first step under the change is the next one.
    step: int
    fields: tuple[FieldChange, ...]

    def __str__(self) -> str:
        return f"after step {self.step}: " + "; ".join(map(str, self.fields))


@dataclass(frozen=True)
class Interval(Record):
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class EarlyEnd(Record):
    """The decision that a job ends before its last step."""

    # The field of the specification that says so: "stop" or "limits.job_seconds".
    field: str
    # Steps that were done when it was decided.
    step: int
    # The reason, for people.
    text: str


@dataclass(frozen=True)
class BestCheckpoint(Record):
    """The checkpoint that a job keeps for the best value of a metric."""

    metric: str
    value: float
    # Steps after which it was saved.
    step: int
    # By policy.
    versions: dict[str, int]


@dataclass(frozen=True)
class Job(Record, id_from="job_id"):
    """The state of a job at the time of the call."""

    id: str
    name: str
    state: JobState
    mode: str
    step: int
    total_steps: int
    activity: str
    directory: str
    versions: dict[str, int]
    # Newest value of every metric.
    metrics: dict[str, float]
    # Held-out evaluation before the first and after the last step.
    before: dict[str, float]
    after: dict[str, float]
    created_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    # Why it failed, or what it waits for.
    problem: TroupeError | None
    # Ordered by field; a field has several entries where workers differ.
    resolved: tuple[ResolvedSetting, ...] = ()
    split_hint: str = ""
    """The change of engines or trainers that would shorten the job's steps; empty if none would."""
    before_intervals: dict[str, Interval] = field(default_factory=dict)
    """Intervals of the scores in `before`, by score."""
    after_intervals: dict[str, Interval] = field(default_factory=dict)
    """Intervals of the scores in `after`, by score."""
    early_end: EarlyEnd | None = None
    """Why it ends, or has ended, before its last step; None: it does not."""
    best: BestCheckpoint | None = None
    """The best checkpoint, if the job keeps one."""
    ran_seconds: float = 0.0
    """Seconds that it has run, as `limits.job_seconds` counts them."""
    tags: tuple[str, ...] = ()
    """Users' own words to find the job by, in order."""
    notes: str = ""
    """Users' own text about the job."""
    history: tuple[JobChange, ...] = ()
    """Changes of its specification by resumes, oldest first."""
    origins: dict[str, PolicyOrigin] = field(default_factory=dict)
    """Origins of its policies' first weights (`init_from`), by policy."""
    spec_json: str = field(repr=False, default="")

    @property
    def signal_steps(self) -> dict[str, int]:
        """The number of steps with a signal, by trained policy. In a step with a signal, the policy
        was updated and not all advantages were zero."""
        found = {policy: self.metrics.get(f"{policy}/{SIGNAL_STEPS}") for policy in self.versions}
        return {policy: int(count) for policy, count in found.items() if count is not None}

    def require_success(self) -> Job:
        """Return the job, which has ended. Raises `JobFailed` or `JobCancelled`."""
        if self.state == JobState.FAILED:
            raise JobFailed(self)
        if self.state == JobState.CANCELLED:
            raise JobCancelled(self)
        return self

    @property
    def priority(self) -> int:
        """The job's precedence over others; 0 by default."""
        return int(self.spec.get("priority", 0))

    @property
    def spec(self) -> dict[str, Any]:
        """The specification with its defaults filled in."""
        return dict(json.loads(self.spec_json)) if self.spec_json else {}


@dataclass(frozen=True)
class Version(Record, part="weights"):
    """One published version of a policy."""

    policy: str
    version: int
    checksum: str
    num_bytes: int
    step: int
    published_at: datetime
    # "applied", "skipped", "empty", "restarted" (at the first weights), or "" (version 0).
    outcome: str

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        if message.restarted:
            given["outcome"] = "restarted"
        return super().of(message, **given)


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint of a policy on its trainer's disk, in the format that `transformers` loads."""

    policy: str
    version: int
    path: str
    num_bytes: int
    saved_at: datetime


@dataclass(frozen=True)
class MetricsRow(Record):
    """The metrics of one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Turn(Record):
    """One generation by one agent."""

    agent: str
    policy: str
    turn: int
    # The prompt's messages as (role, content).
    messages: tuple[tuple[str, str], ...]
    response: str
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    reward: float | None
    # The newest policy version that generated one of its tokens.
    version: int | None = None

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        messages = tuple((one.role, one.content) for one in message.messages)
        version = max((span.version for span in message.versions), default=None)
        return super().of(message, messages=messages, version=version, **given)


@dataclass(frozen=True)
class Trajectory(Record, id_from="trajectory_id"):
    """One run of the workflow on a query; `conversation` is empty in lists of trajectories."""

    id: str
    query_id: str
    step: int
    state: str
    reason: str
    rewards: dict[str, float]
    turns: int
    seconds: float
    evaluation: bool
    conversation: tuple[Turn, ...] = ()

    @classmethod
    def with_turns(cls, message: orchestrator_pb.GetTrajectoryResponse) -> Self:
        """Make a record with its conversation from the wire."""
        return cls.of(message.summary, conversation=tuple(map(Turn.of, message.turns)))

    @property
    def completed(self) -> bool:
        """Whether the workflow returned, so that the trajectory was neither dropped nor failed."""
        return self.state == "completed"


@dataclass(frozen=True)
class Generation(Record):
    """A reply of a policy. `logprobs` has one value per output id."""

    text: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    # The newest policy version that generated one of its tokens.
    version: int | None

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        version = max((span.version for span in message.versions), default=None)
        return super().of(message, version=version, **given)


@dataclass(frozen=True)
class Result:
    """A job that succeeded, and its checkpoints."""

    job: Job
    checkpoints: tuple[Checkpoint, ...]

    @property
    def before(self) -> dict[str, float]:
        """Held-out evaluation before the first step."""
        return self.job.before

    @property
    def after(self) -> dict[str, float]:
        """Held-out evaluation after the last step."""
        return self.job.after

    @property
    def before_intervals(self) -> dict[str, Interval]:
        """95 % confidence intervals of the scores in `before`."""
        return self.job.before_intervals

    @property
    def after_intervals(self) -> dict[str, Interval]:
        """95 % confidence intervals of the scores in `after`."""
        return self.job.after_intervals

    @property
    def problem(self) -> TroupeError | None:
        """Why a job that did all its steps trained nothing: no policy was updated, or trajectories
        had no turns. None for a plain success."""
        return self.job.problem

    @property
    def metrics(self) -> dict[str, float]:
        """Newest value of every metric."""
        return self.job.metrics


class JobFailed(FailedPrecondition):
    """The job ended without a result; `job` is its last record.

    Field, value and remedy come from the problem that ended the job.
    """

    default_kind = "job_failed"

    def __init__(self, job: Job) -> None:
        problem = job.problem
        reason = problem.message if problem else "no reason was recorded"
        super().__init__(
            f"job {job.id} failed: {reason}",
            kind=problem.kind if problem else None,
            field=problem.field if problem else None,
            value=problem.value if problem else None,
            remedy=problem.remedy if problem else None,
        )
        self.job = job


class JobCancelled(FailedPrecondition):
    """The job was cancelled; `job` is its last record."""

    default_kind = "job_cancelled"

    def __init__(self, job: Job) -> None:
        reason = f": {job.problem.message}" if job.problem else ""
        super().__init__(
            f"job {job.id} was cancelled{reason}",
            remedy=f"`troupe jobs resume {job.id}` continues from its last committed step.",
        )
        self.job = job
