"""The durable record of a job: as an object, as a Redis hash, and as the `Job` message for
users."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import ValidationError

from troupe.contracts.metric_names import (
    BOUNDS,
)
from troupe.job import JobSpec
from troupe.job.automatic import with_values
from troupe.job.compatibility import Difference
from troupe.job.loading import explained
from troupe.job.origins import Origin, with_origins
from troupe.job.spec import policy_of
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.twin.hints import split_hint
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

TERMINAL: Final = frozenset(
    {common_pb.JOB_STATE_SUCCEEDED, common_pb.JOB_STATE_FAILED, common_pb.JOB_STATE_CANCELLED}
)
MODES: Final[Mapping[str, common_pb.PipelineMode.ValueType]] = {
    "serial": common_pb.PIPELINE_MODE_SERIAL,
    "sync": common_pb.PIPELINE_MODE_SYNC,
    "micro_batch": common_pb.PIPELINE_MODE_MICRO_BATCH,
    "async": common_pb.PIPELINE_MODE_ASYNC,
}
# Characters of the longest job id.
MAX_JOB_ID: Final = 128
# Value of `evaluated` and `checkpointed` before the first time.
NEVER: Final = -1


def problem_field(problem: common_pb.Problem | None) -> bytes:
    """Return a problem as a field of the hash; empty for None."""
    return b"" if problem is None else problem.SerializeToString()


def _parse_problem(data: bytes) -> common_pb.Problem | None:
    return common_pb.Problem.FromString(data) if data else None


def _parse_state(data: bytes) -> common_pb.JobState.ValueType:
    # `Name` raises for a number that is not a state.
    return common_pb.JobState.Value(
        common_pb.JobState.Name(common_pb.JobState.ValueType(int(data)))
    )


def version_field(policy: str) -> str:
    """Return the field of the hash that holds the newest version of a policy."""
    return f"{_VERSION}{policy}"


_VERSION: Final = "version:"
# Functions that write a field to the hash and read it.
_Codec = tuple[Callable[[Any], str | bytes], Callable[[bytes], Any]]
_TEXT: Final[_Codec] = (str, bytes.decode)
_INT: Final[_Codec] = (str, int)
_FLOAT: Final[_Codec] = (repr, float)
_PROBLEM: Final[_Codec] = (problem_field, _parse_problem)
_TEXTS: Final[_Codec] = (
    lambda texts: json.dumps(list(texts)),
    lambda data: tuple(json.loads(data)),
)
_VALUES: Final[_Codec] = (lambda values: json.dumps(dict(values)), json.loads)
_HISTORY: Final[_Codec] = (
    lambda changes: orchestrator_pb.JobHistory(changes=changes).SerializeToString(),
    lambda data: tuple(orchestrator_pb.JobHistory.FromString(data).changes),
)
_ORIGINS: Final[_Codec] = (
    lambda origins: json.dumps({name: asdict(one) for name, one in origins.items()}),
    lambda data: {name: Origin(**one) for name, one in json.loads(data).items()},
)
_CODECS: Final[Mapping[str, _Codec]] = {
    "job_id": _TEXT,
    "request_id": _TEXT,
    "spec_json": _TEXT,
    "directory": (str, lambda data: Path(data.decode())),
    "created_at": _FLOAT,
    "state": (lambda state: str(int(state)), _parse_state),
    "epoch": _INT,
    "step": _INT,
    "evaluated": _INT,
    "checkpointed": _INT,
    "started_at": _FLOAT,
    "ended_at": _FLOAT,
    "problem": _PROBLEM,
    "checkpoint_problem": _PROBLEM,
    "before": _VALUES,
    "after": _VALUES,
    "decided": _VALUES,
    "ran_seconds": _FLOAT,
    "watched": _VALUES,
    "early_end": _VALUES,
    "best": _VALUES,
    "tags": _TEXTS,
    "notes": _TEXT,
    "history": _HISTORY,
    "origins": _ORIGINS,
}
# Fields that records of earlier releases lack.
_LATER: Final = frozenset(
    {
        "decided",
        "ran_seconds",
        "watched",
        "early_end",
        "best",
        "tags",
        "notes",
        "history",
        "origins",
    }
)


@dataclass(frozen=True)
class JobRecord:
    """The stored record of a job. Times are seconds since the epoch."""

    job_id: str
    request_id: str
    spec_json: str
    directory: Path
    created_at: float
    state: common_pb.JobState.ValueType = common_pb.JOB_STATE_SUBMITTED
    # Counts the runners that took the job over; only the newest one may write.
    epoch: int = 0
    # Committed steps whose result engines serve.
    step: int = 0
    # The step count at which evaluation and checkpoints were last done.
    evaluated: int = NEVER
    checkpointed: int = NEVER
    started_at: float = 0.0
    ended_at: float = 0.0
    problem: common_pb.Problem | None = None
    # Why the newest checkpoint is missing, if so.
    checkpoint_problem: common_pb.Problem | None = None
    # Scores of the evaluations before the first step and after the last, with the bounds of their
    # intervals (`<score>/low`, `<score>/high`).
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    # Numbers that the job leaves open (`auto`), by field: the number and how it came about. Decided
    # when the job starts, kept while it runs, and decided anew when it is resumed.
    decided: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # Seconds that it has run (`limits.job_seconds`).
    ran_seconds: float = 0.0
    # What `stop` has seen of its metric (`jobs.stopping.Watched`).
    watched: Mapping[str, Any] = field(default_factory=dict)
    # The decision to end early (`jobs.stopping.EarlyEnd`); empty: none.
    early_end: Mapping[str, Any] = field(default_factory=dict)
    # The best checkpoint for people, as `orchestrator_pb.BestCheckpoint` has it; empty: none. The
    # files in the job's directory decide.
    best: Mapping[str, Any] = field(default_factory=dict)
    # Users' own, to find the job by.
    tags: Sequence[str] = ()
    notes: str = ""
    # What policies begin with (`init_from`), as found when the job was submitted.
    origins: Mapping[str, Origin] = field(default_factory=dict)
    # What was changed when the job was resumed, oldest first.
    history: Sequence[orchestrator_pb.JobChange] = ()
    # Newest version of each policy that the orchestrator has seen in the experience store.
    versions: Mapping[str, int] = field(default_factory=dict)
    # Whether the stored record is unreadable; `problem` says why.
    broken: bool = False

    @property
    def terminal(self) -> bool:
        """Whether the job has ended (it may be resumed)."""
        return self.state in TERMINAL

    @property
    def seconds_since_start(self) -> float:
        """Seconds since the job began; before it has, since its submission."""
        return time.time() - (self.started_at or self.created_at)

    @property
    def state_name(self) -> str:
        """The state without its prefix: RUNNING."""
        return common_pb.JobState.Name(self.state).removeprefix("JOB_STATE_")

    def spec(self) -> JobSpec:
        """Return the specification, as validated when the job was submitted.

        Raises `FailedPrecondition` for a job of an older release that this one cannot run.
        """
        try:
            return JobSpec.model_validate_json(self.spec_json)
        except ValidationError as error:
            first = explained(error, JobSpec)[0]
            raise FailedPrecondition(
                f"this release does not accept the job's specification: {first.message}",
                kind="spec_outdated",
                field=first.field,
                value=first.value or None,
                remedy="Submit a new job; the old one's checkpoints are unchanged.",
            ) from error

    def decided_spec(self) -> JobSpec:
        """Return the specification with the numbers that have been decided, and with the models
        and adapters that policies begin with. Raises like `spec`."""
        spec = with_origins(self.spec(), self.origins, self.directory)
        return with_values(spec, {one: number for one, (number, _) in self.decided.items()})

    def policy_of(self, name: str) -> str:
        """Return the policy called `name`, or the one that plays the agent `name`. Raises
        `NotFound`."""
        return name if self.broken else policy_of(json.loads(self.spec_json), name)

    def resumed_with(self, spec: JobSpec, differences: Sequence[Difference]) -> JobRecord:
        """Return the record of the job as it goes on under `spec`, which differs in these fields:
        its history has one more change, and a job that had succeeded has another last step."""
        change = orchestrator_pb.JobChange(
            at=timestamp(time.time()),
            step=self.step,
            fields=[
                orchestrator_pb.FieldChange(field=one.path, old=_json(one.old), new=_json(one.new))
                for one in differences
            ],
        )
        return replace(
            self,
            spec_json=spec.model_dump_json(),
            history=(*self.history, change),
            after={} if self.state == common_pb.JOB_STATE_SUCCEEDED else self.after,
        )

    @property
    def renewed(self) -> dict[str, str | bytes]:
        """The fields of the hash that a resume under another specification changes."""
        names = ("spec_json", "history", "after")
        return {name: _CODECS[name][0](getattr(self, name)) for name in names}

    def to_hash(self) -> dict[str, str | bytes]:
        """Return the fields of the Redis hash."""
        return {
            **{name: write(getattr(self, name)) for name, (write, _) in _CODECS.items()},
            **{version_field(policy): str(number) for policy, number in self.versions.items()},
        }

    @staticmethod
    def read(job_id: str, fields: Mapping[bytes, bytes]) -> JobRecord:
        """Return the record that `to_hash` wrote, or a broken one if that cannot be read."""
        try:
            # The id in the list of jobs counts, whatever the record says.
            return replace(JobRecord.from_hash(fields), job_id=job_id)
        except Exception as error:
            directory = fields.get(b"directory", b"").decode(errors="replace")
            return JobRecord.unreadable(job_id, f"{type(error).__name__}: {error}", directory)

    @staticmethod
    def unreadable(job_id: str, why: str, directory: str = "") -> JobRecord:
        """Return a broken record for one that cannot be read because of `why`."""
        return JobRecord(
            job_id=job_id,
            request_id="",
            spec_json="{}",
            directory=Path(directory),
            created_at=0.0,
            state=common_pb.JOB_STATE_FAILED,
            problem=_broken(why),
            broken=True,
        )

    @staticmethod
    def from_hash(fields: Mapping[bytes, bytes]) -> JobRecord:
        """Parse the record that `to_hash` wrote. Raises any error for other fields."""
        prefix = _VERSION.encode()
        return JobRecord(
            **{
                name: read(fields[name.encode()])
                for name, (_, read) in _CODECS.items()
                if name not in _LATER or name.encode() in fields
            },
            versions={
                name.removeprefix(prefix).decode(): int(value)
                for name, value in fields.items()
                if name.startswith(prefix)
            },
        )

    def to_message(
        self,
        *,
        metrics: Mapping[str, float],
        activity: str,
        resolved: Sequence[common_pb.ResolvedSetting] = (),
    ) -> orchestrator_pb.Job:
        """Return the job as users see it. If it cannot be shown, a message that says so: one broken
        record must not prevent listing the other jobs."""
        try:
            job = self._message(metrics, activity)
            job.resolved.extend(resolved)
            return job
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            job = orchestrator_pb.Job(
                job_id=self.job_id, state=self.state, directory=str(self.directory)
            )
            job.problem.CopyFrom(_broken(why))
            return job

    def check_viewable(self) -> None:
        """Raise ValueError or a similar error unless the record can be shown. Call this before
        storing it."""
        self._message({}, "").SerializeToString()
        JobRecord.from_hash({key.encode(): _bytes(value) for key, value in self.to_hash().items()})

    def _message(self, metrics: Mapping[str, float], activity: str) -> orchestrator_pb.Job:
        # Not validated: this may be a job of an older release.
        spec = json.loads(self.spec_json)
        pipeline = spec.get("pipeline", {})
        job = orchestrator_pb.Job(
            job_id=self.job_id,
            name=spec.get("name", ""),
            state=self.state,
            mode=MODES.get(pipeline.get("mode", ""), common_pb.PIPELINE_MODE_UNSPECIFIED),
            step=self.step,
            total_steps=pipeline.get("steps", 0),
            versions=self.versions,
            spec_json=self.spec_json,
            metrics=metrics,
            directory=str(self.directory),
            before=scores(self.before),
            after=scores(self.after),
            before_intervals=intervals(self.before),
            after_intervals=intervals(self.after),
            activity=activity,
            split_hint=split_hint(metrics),
            history=self.history,
            origins={
                name: orchestrator_pb.PolicyOrigin(
                    job_id=one.job,
                    policy=one.policy,
                    version=one.version if one.version >= 0 else None,
                    path=one.url or str(self.directory / one.path),
                    optimizer=one.optimizer,
                )
                for name, one in self.origins.items()
            },
            created_at=timestamp(self.created_at),
            ran_seconds=self.ran_seconds,
            tags=self.tags,
            notes=self.notes,
        )
        if self.early_end:
            end = self.early_end
            job.early_end.CopyFrom(
                orchestrator_pb.EarlyEnd(field=end["field"], step=end["step"], text=end["text"])
            )
        if self.best:
            job.best.CopyFrom(orchestrator_pb.BestCheckpoint(**self.best))
        if self.started_at:
            job.started_at.CopyFrom(timestamp(self.started_at))
        if self.ended_at:
            job.ended_at.CopyFrom(timestamp(self.ended_at))
        if self.problem is not None:
            job.problem.CopyFrom(self.problem)
        return job


# Limits of attachments to a job.
MOST_TAGS: Final = 32
_LONGEST_TAG: Final = 64
_LONGEST_NOTES: Final = 4_000


def check_tags(tags: Sequence[str], field: str = "tags") -> tuple[str, ...]:
    """Return tags without repetitions, in order. Raises `InvalidArgument`, which names `field`."""
    for tag in tags:
        if tag != tag.strip() or not tag.isprintable() or not 0 < len(tag) <= _LONGEST_TAG:
            raise InvalidArgument(
                "is not a tag",
                field=field,
                value=tag,
                remedy=f"Use 1 to {_LONGEST_TAG} printable characters, with no space at the ends.",
            )
    found = tuple(sorted(set(tags)))
    if len(found) > MOST_TAGS:
        raise InvalidArgument(
            f"{len(found)} tags are more than {MOST_TAGS}",
            field=field,
            remedy="Remove some, or write them into the notes.",
        )
    return found


def check_notes(notes: str) -> str:
    """Return a job's notes. Raises `InvalidArgument`."""
    if len(notes) > _LONGEST_NOTES:
        raise InvalidArgument(
            f"have {len(notes):,} characters, more than {_LONGEST_NOTES:,}",
            field="notes",
            remedy="Shorten them, or keep the text in a file and its name here.",
        )
    return notes


def scores(values: Mapping[str, float]) -> dict[str, float]:
    """Return the scores among the values of an evaluation, without the bounds of their
    intervals."""
    bounds = {f"{name}{end}" for name in values for end in BOUNDS}
    return {name: value for name, value in values.items() if name not in bounds}


def intervals(values: Mapping[str, float]) -> dict[str, orchestrator_pb.ScoreInterval]:
    """Return the intervals of the scores among the values of an evaluation, by score."""
    low, high = BOUNDS
    return {
        name: orchestrator_pb.ScoreInterval(low=values[name + low], high=values[name + high])
        for name in scores(values)
        if name + low in values and name + high in values
    }


@dataclass
class LiveJob:
    """A job that this process runs, as its metrics show it."""

    state: common_pb.JobState.ValueType
    step: int = 0
    # The newest row of metrics, by kind: of a step, of an evaluation.
    rows: dict[str, Mapping[str, float]] = field(default_factory=dict)
    # The newest committed weight version of each policy.
    versions: dict[str, int] = field(default_factory=dict)

    def note_versions(self, versions: Mapping[str, int]) -> None:
        """Note newer versions of policies; they may come out of order."""
        for policy, version in versions.items():
            self.versions[policy] = max(version, self.versions.get(policy, 0))

    def values(self) -> dict[str, float]:
        """The values of both rows, safe to read from another thread while rows arrive."""
        return {name: value for row in list(self.rows.values()) for name, value in row.items()}


def _broken(why: str) -> common_pb.Problem:
    return common_pb.Problem(
        kind="record_broken",
        message=f"the stored record of this job is unreadable: {why[:200]}",
        remedy="`troupe jobs forget JOB_ID` removes it; its files stay where they are.",
    )


def _json(value: Any) -> str:
    """Return a field's value as JSON; empty if the field is not there."""
    return "" if value is None else json.dumps(value)


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def not_a_page(token: str, message: str = "is not a page of this list") -> InvalidArgument:
    """Return the error of a page token of another list."""
    return InvalidArgument(
        message, field="page_token", value=token, remedy="Start from the first page."
    )


def timestamp(seconds: float) -> Timestamp:
    """Return the seconds since the epoch as a protobuf timestamp (whole nanoseconds)."""
    whole, nanos = divmod(round(seconds * 1e9), 10**9)
    return Timestamp(seconds=whole, nanos=nanos)
