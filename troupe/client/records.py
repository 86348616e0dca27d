"""What the SDK returns: plain frozen records, made from the messages of the orchestrator."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from troupe import states, tensors
from troupe.functions.costs import costs_of, schema_of
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc.errors import TroupeError
from troupe.v1 import common_pb2, experience_store_pb2, rollout_pb2
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import reward_pb2 as reward_pb


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


@dataclass(frozen=True)
class Worker:
    """A rollout or trainer process."""

    id: str
    kind: str
    address: str
    alive: bool
    seconds_since_heartbeat: float
    doing: str
    rss_bytes: int
    # Of trainers: policies that it may hold at once (0: any number), and the fraction of the last
    # seconds in which it computed.
    slots: int | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class Engine:
    """One serving replica of one policy."""

    id: str
    job_id: str
    policy: str
    kind: str
    state: str
    version: int | None
    running: int
    waiting: int
    tokens_per_second: float
    worker_id: str
    message: str
    restarts: int
    device_class: str = ""


@dataclass(frozen=True)
class Binding:
    """A policy holding training devices, or waiting for some (`suspended`)."""

    job_id: str
    policy: str
    state: str
    version: int
    step: int
    samples: int
    # Suspended elsewhere, its state is ready here.
    prefetched: bool = False
    # How often it came to this worker or left, and the seconds that this kept its device idle.
    swaps: int = 0
    swap_seconds: float = 0.0


@dataclass(frozen=True)
class Service:
    """One service as the orchestrator sees it."""

    name: str
    address: str
    serving: bool
    message: str


@dataclass(frozen=True)
class Cluster:
    """What every part of a cluster does now."""

    workers: tuple[Worker, ...]
    engines: tuple[Engine, ...]
    bindings: tuple[Binding, ...]
    services: tuple[Service, ...]
    # Trajectories admitted and not ended, per job.
    in_flight: dict[str, int]
    # Trainer workers with which no policy would wait for another; 0: nobody needs one.
    wanted_trainers: int = 0

    @classmethod
    def of(cls, reply: pb.GetClusterResponse) -> Cluster:
        """From the wire."""
        return cls(
            workers=tuple(
                Worker(
                    id=w.worker_id,
                    kind=word(pb.WorkerKind, w.kind),
                    address=w.address,
                    alive=w.alive,
                    seconds_since_heartbeat=w.seconds_since_heartbeat,
                    doing=w.doing,
                    rss_bytes=w.rss_bytes,
                    slots=w.trainer.slots if w.HasField("trainer") else None,
                    utilization=w.trainer.utilization if w.HasField("trainer") else None,
                )
                for w in reply.workers
            ),
            engines=tuple(
                Engine(
                    id=e.engine_id,
                    job_id=e.job_id,
                    policy=e.policy,
                    kind=e.kind,
                    state=word(common_pb2.EngineState, e.state),
                    version=e.version if e.HasField("version") else None,
                    running=e.running,
                    waiting=e.waiting,
                    tokens_per_second=e.tokens_per_second,
                    worker_id=e.worker_id,
                    message=e.message,
                    restarts=e.restarts,
                    device_class=e.device_class,
                )
                for e in reply.engines
            ),
            bindings=tuple(
                Binding(
                    job_id=b.job_id,
                    policy=b.policy,
                    state=word(common_pb2.BindingState, b.state),
                    version=b.version,
                    step=b.step,
                    samples=b.samples,
                    prefetched=b.prefetched,
                    swaps=b.swaps,
                    swap_seconds=b.swap_seconds,
                )
                for b in reply.bindings
            ),
            services=tuple(
                Service(name=s.name, address=s.address, serving=s.serving, message=s.message)
                for s in reply.services
            ),
            in_flight=dict(reply.in_flight),
            wanted_trainers=reply.wanted_trainers,
        )


class InvocationFailed(TroupeError):
    """A call that ended without a result. `kind` says how: "raised", "timeout", "out_of_memory",
    "worker_died", "bad_result", "cancelled", "not_importable", "quota_exhausted", ..."""

    default_kind: ClassVar[str] = "invocation_failed"

    def __init__(self, name: str, error: reward_pb.InvocationError) -> None:
        super().__init__(
            f"{name}: {error.message}",
            kind=word(reward_pb.InvocationError.Kind, error.kind) or None,
        )
        self.traceback = error.traceback
        """The last lines of the function's own traceback."""
        self.output = error.output
        """The last that it printed."""


def result_of(reply: reward_pb.InvokeResponse) -> tuple[Any, reward_pb.InvocationError | None]:
    """The value of a call, or why there is none: functions, and sandboxes, may answer anything."""
    if reply.WhichOneof("outcome") == "error":
        return None, reply.error
    try:
        return parse_json(reply.result_json), None
    except NotJsonError as error:
        return None, reward_pb.InvocationError(
            kind=reward_pb.InvocationError.KIND_BAD_RESULT,
            message=f"its answer is not JSON: {error}. Return finite numbers, strings, booleans, "
            "None, lists and dicts of them",
        )


@dataclass(frozen=True)
class Invocation:
    """How a call ended: with a `value`, or with an `error`."""

    id: str
    value: Any
    error: InvocationFailed | None
    queue_seconds: float
    run_seconds: float
    # What it took to start a worker and import the code; 0: it was warm.
    cold_start_seconds: float
    cores: int
    # Times that it was begun.
    attempts: int
    # Where it ran; empty: on the service's own host.
    host: str = ""

    @classmethod
    def of(cls, name: str, invocation_id: str, reply: reward_pb.InvokeResponse) -> Invocation:
        """From the wire."""
        value, error = result_of(reply)
        return cls(
            id=invocation_id,
            value=value,
            error=None if error is None else InvocationFailed(name, error),
            queue_seconds=reply.queue_seconds,
            run_seconds=reply.run_seconds,
            cold_start_seconds=reply.cold_start_seconds,
            cores=reply.cores,
            attempts=reply.attempts,
            host=reply.host,
        )


@dataclass(frozen=True)
class InvocationProgress:
    """What happens to a call until it ends: `state` is "queued", "started" or "output"."""

    state: str
    # Calls of the function before it.
    ahead: int = 0
    attempt: int = 0
    cores: int = 0
    # What it printed since the progress before.
    output: str = ""


@dataclass(frozen=True)
class LogLine:
    """Something that a call printed."""

    at: datetime
    version: str
    job_id: str
    trajectory_id: str
    invocation_id: str
    text: str

    @classmethod
    def of(cls, line: reward_pb.LogLine) -> LogLine:
        """From the wire."""
        at = datetime.fromtimestamp(line.seconds, UTC)
        return cls(at, line.version, line.job_id, line.trajectory_id, line.invocation_id, line.text)


@dataclass(frozen=True)
class Function:
    """A function of the reward service, and what became of its calls since that started."""

    name: str
    version: str
    # "reward", "tool", or empty where nobody said.
    kind: str
    entrypoint: str
    # Of its uploaded source; empty: it is importable where the service runs.
    source_sha256: str
    description: str
    # JSON schema of its arguments.
    parameters: dict[str, Any]
    costs: dict[str, Any]
    invocations: int
    errors: int
    running: int
    queued: int
    mean_seconds: float
    # Learned: a call takes serial + parallel / cores seconds.
    serial_seconds: float
    parallel_seconds: float
    warm_workers: int
    cold_starts: int
    cold_start_p50_seconds: float
    cold_start_p99_seconds: float
    retried: int

    @property
    def job_id(self) -> str:
        """The job that it belongs to; empty: it was deployed."""
        return self.name.partition("/")[0] if "/" in self.name else ""

    @classmethod
    def of(cls, status: reward_pb.FunctionStatus) -> Function:
        """From the wire."""
        spec = status.function
        return cls(
            name=spec.name,
            version=spec.version,
            kind=spec.kind,
            entrypoint=spec.entrypoint,
            source_sha256=spec.source_sha256,
            description=spec.description,
            parameters=schema_of(spec),
            costs=costs_of(spec),
            invocations=status.invocations,
            errors=status.errors,
            running=status.running,
            queued=status.queued,
            mean_seconds=status.mean_seconds,
            serial_seconds=status.serial_seconds,
            parallel_seconds=status.parallel_seconds,
            warm_workers=status.warm_workers,
            cold_starts=status.cold_starts,
            cold_start_p50_seconds=status.cold_start_p50_seconds,
            cold_start_p99_seconds=status.cold_start_p99_seconds,
            retried=status.retried,
        )


T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One trainable row of one policy.

    Token ids, log-probs and columns are there until the sample's step is committed; then its
    payload is freed and they are None and empty.
    """

    id: str
    policy: str
    query_id: str
    trajectory_id: str
    agent: str
    turn: int
    group_id: str
    # "pending", "ready", "claimed", "trained", "dropped"
    state: str
    reward: float | None
    # Oldest version that drew a token of it; None when freed.
    version: int | None
    uses: int
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    logprobs: list[float] | None
    # User-defined columns: lists of numbers, JSON values, or {"ref": key} of a large one.
    columns: dict[str, Any]

    @classmethod
    def of(cls, sample: es.Sample) -> Sample:
        """From the wire. Raises `ChecksumError` for a damaged tensor."""
        there = sample.HasField("response_ids")
        return cls(
            id=sample.sample_id,
            policy=sample.policy,
            query_id=sample.query_id,
            trajectory_id=sample.trajectory_id,
            agent=sample.agent,
            turn=sample.turn,
            group_id=sample.group_id,
            state=word(common_pb2.SampleState, sample.state),
            reward=sample.reward if sample.HasField("reward") else None,
            version=min((span.version for span in sample.versions), default=None),
            uses=sample.uses,
            prompt_ids=tensors.from_proto(sample.prompt_ids).tolist() if there else None,
            response_ids=tensors.from_proto(sample.response_ids).tolist() if there else None,
            logprobs=tensors.from_proto(sample.logprobs).tolist() if there else None,
            columns={name: _value(column) for name, column in sample.columns.items()},
        )


@dataclass(frozen=True)
class TableSummary:
    """What one policy's table holds: uncommitted steps by state, totals since the job began."""

    policy: str
    # Of the newest commit; -1 before the first.
    version: int
    committed_step: int
    newest_step: int
    pending: int
    ready: int
    claimed: int
    trained: int
    dropped: int
    drop_reasons: dict[str, int]
    oldest_pending_seconds: float
    oldest_pending_sample: str
    payload_bytes: int

    @property
    def lag(self) -> int:
        """Open steps that this policy has not committed."""
        return max(0, self.newest_step - self.committed_step)


@dataclass(frozen=True)
class Tables:
    """All tables of a job, and the memory of the store that they are in."""

    tables: tuple[TableSummary, ...]
    payload_bytes: int
    # 0: no mark is set.
    high_water_bytes: int
    over_high_water: bool
    redis_bytes: int

    @classmethod
    def of(cls, reply: es.DescribeTablesResponse) -> Tables:
        """From the wire."""
        return cls(
            tables=tuple(_record(TableSummary, one) for one in reply.tables),
            payload_bytes=reply.payload_bytes,
            high_water_bytes=reply.high_water_bytes,
            over_high_water=reply.over_high_water,
            redis_bytes=reply.redis_bytes,
        )


@dataclass(frozen=True)
class PolicyAudit:
    """What became of every sample of one policy."""

    policy: str
    appended: int
    trained: int
    dropped: int
    # In steps that are not committed yet.
    live: int
    drop_reasons: dict[str, int]
    steps_applied: int
    steps_skipped: int
    steps_empty: int
    version: int
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Audit:
    """Whether every sample was trained once or dropped with a reason."""

    policies: tuple[PolicyAudit, ...]
    # What contradicts the promise, in words; empty when it holds.
    violations: tuple[str, ...]
    steps: int
    trajectories_admitted: int
    trajectories_ended: int
    trajectories_by_state: dict[str, int]
    # Newest version of every policy, as the ledger holds it.
    versions: tuple[Version, ...]

    @property
    def passed(self) -> bool:
        """Nothing contradicts the promise."""
        return not self.violations and not self.lost and not self.duplicated

    @property
    def lost(self) -> int:
        """Samples that are neither trained nor dropped nor live."""
        return sum(one.lost for one in self.policies)

    @property
    def duplicated(self) -> int:
        """Uses of samples beyond what the job allows."""
        return sum(one.duplicated for one in self.policies)

    @classmethod
    def of(cls, reply: pb.AuditJobResponse) -> Audit:
        """From the wire."""
        tables = reply.tables
        return cls(
            policies=tuple(_record(PolicyAudit, one) for one in tables.policies),
            violations=tuple(reply.violations),
            steps=tables.steps,
            trajectories_admitted=tables.trajectories_admitted,
            trajectories_ended=tables.trajectories_ended,
            trajectories_by_state=dict(tables.trajectories_by_state),
            versions=tuple(Version.of(version) for version in reply.versions),
        )


def _record(kind: type[T], message: es.TableSummary | es.PolicyAudit) -> T:
    """A record whose fields are named as those of the message."""
    maps = {"drop_reasons": dict(message.drop_reasons)}
    named = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: maps.get(name, getattr(message, name)) for name in named})


def _value(column: es.Column) -> Any:
    match column.WhichOneof("value"):
        case "tensor":
            return tensors.from_proto(column.tensor).tolist()
        case "json":
            return json.loads(column.json)
        case "ref":
            return {"ref": column.ref}
    return None
