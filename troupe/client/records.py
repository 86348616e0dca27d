"""What the SDK returns: plain frozen records, made from the messages of the orchestrator."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from troupe import states
from troupe.rpc.errors import TroupeError
from troupe.v1 import common_pb2, experience_store_pb2, rollout_pb2
from troupe.v1 import orchestrator_pb2 as pb


class JobState(StrEnum):
    """The life of a job; allowed moves are in `troupe.states.JOB`."""

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

    @classmethod
    def of(cls, number: int) -> JobState:
        """From the wire's number; one that this library does not know is UNSPECIFIED."""
        return cls(word(common_pb2.JobState, number) or cls.UNSPECIFIED)

    @property
    def number(self) -> int:
        """The wire's number."""
        return int(common_pb2.JobState.Value(f"JOB_STATE_{self.upper()}"))

    @property
    def ended(self) -> bool:
        """Nothing happens any more, unless somebody resumes the job."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def resumable(self) -> bool:
        """Whether a resume would be accepted."""
        return states.allowed(states.JOB, self.number, common_pb2.JOB_STATE_SUBMITTED)


@dataclass(frozen=True)
class Job:
    """A job as it was when it was asked for."""

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
    spec_json: str = field(repr=False, default="")

    @property
    def spec(self) -> dict[str, Any]:
        """The specification with its defaults filled in."""
        return dict(json.loads(self.spec_json)) if self.spec_json else {}

    @classmethod
    def of(cls, job: pb.Job) -> Job:
        """From the wire."""
        return cls(
            id=job.job_id,
            name=job.name,
            state=JobState.of(job.state),
            mode=word(common_pb2.PipelineMode, job.mode),
            step=job.step,
            total_steps=job.total_steps,
            activity=job.activity,
            directory=job.directory,
            versions=dict(job.versions),
            metrics=dict(job.metrics),
            before=dict(job.before),
            after=dict(job.after),
            created_at=when(job.created_at) if job.HasField("created_at") else None,
            started_at=when(job.started_at) if job.HasField("started_at") else None,
            ended_at=when(job.ended_at) if job.HasField("ended_at") else None,
            problem=TroupeError.from_problem(job.problem) if job.HasField("problem") else None,
            spec_json=job.spec_json,
        )


@dataclass(frozen=True)
class Version:
    """One published version of a policy."""

    policy: str
    version: int
    checksum: str
    num_bytes: int
    step: int
    published_at: datetime
    # "applied", "skipped", "empty"; "restarted" for the first weights again; "" for version 0.
    outcome: str

    @classmethod
    def of(cls, version: pb.PolicyVersion) -> Version:
        """From the wire."""
        return cls(
            policy=version.weights.policy,
            version=version.weights.version,
            checksum=version.weights.checksum,
            num_bytes=version.weights.num_bytes,
            step=version.step,
            published_at=when(version.published_at),
            outcome="restarted"
            if version.restarted
            else word(experience_store_pb2.StepOutcome, version.outcome),
        )


@dataclass(frozen=True)
class Checkpoint:
    """Weights on disk that `transformers` loads, on the machine of the trainer."""

    policy: str
    version: int
    path: str
    num_bytes: int
    saved_at: datetime

    @classmethod
    def of(cls, checkpoint: pb.Checkpoint) -> Checkpoint:
        """From the wire."""
        return cls(
            policy=checkpoint.policy,
            version=checkpoint.version,
            path=checkpoint.path,
            num_bytes=checkpoint.num_bytes,
            saved_at=when(checkpoint.saved_at),
        )


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Turn:
    """One generation by one agent."""

    agent: str
    policy: str
    turn: int
    # role, content
    messages: tuple[tuple[str, str], ...]
    response: str
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    reward: float | None

    @classmethod
    def of(cls, turn: rollout_pb2.Turn) -> Turn:
        """From the wire."""
        return cls(
            agent=turn.agent,
            policy=turn.policy,
            turn=turn.turn,
            messages=tuple((m.role, m.content) for m in turn.messages),
            response=turn.response,
            prompt_tokens=turn.prompt_tokens,
            response_tokens=turn.response_tokens,
            finish_reason=turn.finish_reason,
            reward=turn.reward if turn.HasField("reward") else None,
        )


@dataclass(frozen=True)
class Trajectory:
    """One run of the workflow on a query. `conversation` is filled when asked for by id."""

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
    def of(cls, summary: pb.TrajectorySummary, turns: tuple[Turn, ...] = ()) -> Trajectory:
        """From the wire."""
        return cls(
            id=summary.trajectory_id,
            query_id=summary.query_id,
            step=summary.step,
            state=word(common_pb2.TrajectoryState, summary.state),
            reason=summary.reason,
            rewards=dict(summary.rewards),
            turns=summary.turns,
            seconds=summary.seconds,
            evaluation=summary.evaluation,
            conversation=turns,
        )


@dataclass(frozen=True)
class Generation:
    """What a policy generated. `logprobs` has one value per output id."""

    text: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    # Newest version that generated a token of it.
    version: int | None

    @classmethod
    def of(cls, reply: rollout_pb2.GenerateResponse) -> Generation:
        """From the wire."""
        return cls(
            text=reply.text,
            input_ids=tuple(reply.input_ids),
            output_ids=tuple(reply.output_ids),
            logprobs=tuple(reply.logprobs),
            finish_reason=reply.finish_reason,
            version=max((span.version for span in reply.versions), default=None),
        )


@dataclass(frozen=True)
class Result:
    """How a job ended well."""

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
    def problem(self) -> TroupeError | None:
        """Why the job, though all of its steps are done, taught nothing: no policy was ever
        updated, or trajectories made no turns. None for a plain success."""
        return self.job.problem

    @property
    def metrics(self) -> dict[str, float]:
        """Newest value of every metric."""
        return self.job.metrics


def when(stamp: Timestamp) -> datetime:
    """A timestamp of the wire in UTC."""
    return stamp.ToDatetime(tzinfo=UTC)


def word(enum: Any, number: int) -> str:
    """An enum's value without its prefix, in lower case: "running", "micro_batch".

    Unspecified, and numbers that this library does not know (a newer server), are "".
    """
    names = {value.number: name for name, value in enum.DESCRIPTOR.values_by_name.items()}
    name = names.get(number, "")
    prefix = names[0].removesuffix("UNSPECIFIED")
    return "" if number == 0 else name.removeprefix(prefix).lower()
