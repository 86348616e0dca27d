"""Frozen records of jobs, clusters, functions and samples, job events, and the SDK's own errors."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, Final, Literal, Self

from troupe import states, tensors
from troupe.client.conversion import Record, when, word
from troupe.contracts.metric_names import (
    SIGNAL_STEPS,
)
from troupe.functions.costs import costs_of, schema_of
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc.errors import FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb


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


@dataclass(frozen=True)
class Worker(Record, id_from="worker_id", part="trainer"):
    """A rollout or trainer process."""

    id: str
    kind: str
    address: str
    alive: bool
    seconds_since_heartbeat: float
    doing: str
    rss_bytes: int
    # Trainers only: how many policies it may hold at once (0: any number), and the fraction of the
    # last seconds in which it computed.
    slots: int | None = None
    utilization: float | None = None
    # The node that started it; empty if none did.
    node: str = ""


@dataclass(frozen=True)
class Engine(Record, id_from="engine_id"):
    """One inference engine: a serving replica of one policy."""

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
    # The last weight update: its transport, the seconds without service, and its total seconds.
    update_way: str = ""
    update_exposed_seconds: float = 0.0
    update_seconds: float = 0.0


@dataclass(frozen=True)
class Binding(Record):
    """A policy that holds training devices, or waits for them (`suspended`)."""

    job_id: str
    policy: str
    state: str
    version: int
    step: int
    samples: int
    # Suspended on another worker, with its training state already on this one.
    prefetched: bool = False
    # How often it was swapped in or out here, and how many seconds the device idled meanwhile.
    swaps: int = 0
    swap_seconds: float = 0.0
    # The current or last checkpoint: bytes written, and bytes in total.
    checkpoint_written_bytes: int = 0
    checkpoint_bytes: int = 0
    # While the ranks of a gang load the model: bytes loaded, and bytes in total.
    loaded_bytes: int = 0
    load_bytes: int = 0


@dataclass(frozen=True)
class Service(Record):
    """Health of one service, as the orchestrator sees it."""

    name: str
    address: str
    serving: bool
    message: str


@dataclass(frozen=True)
class NodeDevice(Record):
    """A device of a node."""

    index: int
    device_class: str
    memory_bytes: int
    # As reported by its driver; None for a declared device.
    used_bytes: int | None
    utilization: float | None
    # The process that has it; empty if none has.
    process: str
    # What computes on it: a trainer's "JOB/POLICY" or an engine's id.
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Node(Record, id_from="name"):
    """The supervisor of one host."""

    id: str
    host: str
    alive: bool
    seconds_since_heartbeat: float
    devices: tuple[NodeDevice, ...]


@dataclass(frozen=True)
class Cluster(Record):
    """Workers, engines, bindings and services of a cluster at the time of the call."""

    workers: tuple[Worker, ...]
    engines: tuple[Engine, ...]
    bindings: tuple[Binding, ...]
    services: tuple[Service, ...]
    # Trajectories in flight, per job.
    in_flight: dict[str, int]
    # The number of trainer workers at which no policy would wait for another.
    wanted_trainers: int = 0
    nodes: tuple[Node, ...] = ()


class InvocationFailed(TroupeError):
    """A function call ended without a result; `kind`: "raised", "timeout", "out_of_memory",
    "worker_died", "bad_result", "cancelled", "not_importable", "quota_exhausted", ..."""

    default_kind: ClassVar[str] = "invocation_failed"

    def __init__(self, name: str, error: reward_pb.InvocationError) -> None:
        super().__init__(
            f"{name}: {error.message}",
            kind=word(reward_pb.InvocationError.Kind.DESCRIPTOR, error.kind) or None,
        )
        self.traceback = error.traceback
        """The last lines of the function's own traceback."""
        self.output = error.output
        """The last lines that the function printed."""


def result_of(reply: reward_pb.InvokeResponse) -> tuple[Any, reward_pb.InvocationError | None]:
    """Return a call's value, or why it has none; a value that is not JSON is an error."""
    if reply.WhichOneof("outcome") == "error":
        return None, reply.error
    try:
        return parse_json(reply.result_json), None
    except NotJsonError as error:
        return None, reward_pb.InvocationError(
            kind=reward_pb.InvocationError.KIND_BAD_RESULT,
            message=f"its result is not JSON: {error}. Return finite numbers, strings, booleans, "
            "None, and lists and dicts of these",
        )


@dataclass(frozen=True)
class Invocation(Record):
    """The outcome of a function call: a `value` or an `error`."""

    id: str
    value: Any
    error: InvocationFailed | None
    queue_seconds: float
    run_seconds: float
    # Time to start a worker and import the code; 0 if a warm worker took the call.
    cold_start_seconds: float
    cores: int
    # The number of attempts.
    attempts: int
    # The host that it ran on; empty if it ran on the reward service's host.
    host: str = ""

    @classmethod
    def of_call(cls, name: str, invocation_id: str, reply: reward_pb.InvokeResponse) -> Self:
        """Make the outcome of the call `invocation_id` of the function `name`."""
        value, error = result_of(reply)
        failure = None if error is None else InvocationFailed(name, error)
        return cls.of(reply, id=invocation_id, value=value, error=failure)


@dataclass(frozen=True)
class InvocationProgress:
    """Progress of a function call that has not ended: "queued", "started" or "output"."""

    state: str
    # The number of calls of the function that are queued before it.
    ahead: int = 0
    attempt: int = 0
    cores: int = 0
    # The text printed since the last progress.
    output: str = ""


@dataclass(frozen=True)
class LogLine(Record):
    """A line that a function call printed."""

    at: datetime
    version: str
    job_id: str
    trajectory_id: str
    invocation_id: str
    text: str

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        return super().of(message, at=datetime.fromtimestamp(message.seconds, UTC), **given)


@dataclass(frozen=True)
class Function(Record, part="function"):
    """A function of the reward service, with counts of its calls since the service started."""

    name: str
    version: str
    # "reward", "tool", or empty if not declared.
    kind: str
    entrypoint: str
    # Digest of its uploaded source; empty if its code is installed where the service runs.
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
    # Measured speed-up: a call takes serial + parallel / cores seconds.
    serial_seconds: float
    parallel_seconds: float
    warm_workers: int
    cold_starts: int
    cold_start_p50_seconds: float
    cold_start_p99_seconds: float
    retried: int

    @property
    def job_id(self) -> str:
        """The id of the job that it belongs to; empty for a deployed function."""
        return self.name.partition("/")[0] if "/" in self.name else ""

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        spec = message.function
        return super().of(message, parameters=schema_of(spec), costs=costs_of(spec), **given)


@dataclass(frozen=True)
class Sample(Record, id_from="sample_id"):
    """One trainable row (a turn) of one policy.

    When the sample's step is committed, its contents are freed: from then on, token ids and
    log-probs are None and `columns` is empty.
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
    # The oldest policy version that generated one of its tokens; None when freed.
    version: int | None
    uses: int
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    logprobs: list[float] | None
    # User-defined columns: lists of numbers, JSON values, or {"ref": key} of a large one.
    columns: dict[str, Any]
    # What tokens of the prompt stand for: kind, media_type, sha256, position, tokens, and the
    # content: data in base64, or ref, the key of a large one.
    payloads: list[dict[str, Any]]

    @classmethod
    def of(cls, message: store_pb.Sample, **given: Any) -> Self:
        """Make a sample from the wire. Raises `ChecksumError` for a damaged tensor."""
        there = message.HasField("response_ids")
        for name in ("prompt_ids", "response_ids", "logprobs"):
            given[name] = tensors.from_proto(getattr(message, name)).tolist() if there else None
        return super().of(
            message,
            version=min((span.version for span in message.versions), default=None),
            columns={name: _column(column) for name, column in message.columns.items()},
            payloads=[_payload(one) for one in message.payloads],
            **given,
        )


@dataclass(frozen=True)
class TableSummary(Record):
    """One policy's table: samples of uncommitted steps by state, and totals since the job began."""

    policy: str
    # The version of the newest commit; -1 before the first.
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
        """The number of open steps that this policy has not committed."""
        return max(0, self.newest_step - self.committed_step)


@dataclass(frozen=True)
class Tables(Record):
    """All tables of a job, and the memory use of the experience store."""

    tables: tuple[TableSummary, ...]
    payload_bytes: int
    # Bytes of rows above which rollout is slowed down; 0: no limit.
    high_water_bytes: int
    over_high_water: bool
    redis_bytes: int


@dataclass(frozen=True)
class PolicyAudit(Record):
    """How many samples of one policy were trained, dropped, lost or used too often."""

    policy: str
    appended: int
    trained: int
    dropped: int
    # Samples of steps that are not committed yet.
    live: int
    drop_reasons: dict[str, int]
    steps_applied: int
    steps_skipped: int
    steps_empty: int
    version: int
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Audit(Record, part="tables"):
    """An audit of a job: whether every sample was trained once or dropped with a reason."""

    policies: tuple[PolicyAudit, ...]
    # A description of each contradiction.
    violations: tuple[str, ...]
    steps: int
    trajectories_admitted: int
    trajectories_ended: int
    trajectories_by_state: dict[str, int]
    # Newest published version of every policy.
    versions: tuple[Version, ...]

    @property
    def passed(self) -> bool:
        """Whether no violation, lost or duplicated sample was found."""
        return not self.violations and not self.lost and not self.duplicated

    @property
    def lost(self) -> int:
        """The number of samples that are neither trained nor dropped nor live."""
        return sum(one.lost for one in self.policies)

    @property
    def duplicated(self) -> int:
        """The number of uses of samples beyond the job's limit."""
        return sum(one.duplicated for one in self.policies)


def _payload(payload: store_pb.Payload) -> dict[str, Any]:
    large = payload.HasField("ref")
    return {
        "kind": payload.kind,
        "media_type": payload.media_type,
        "sha256": payload.digest.hex(),
        "position": payload.position,
        "tokens": payload.tokens,
        **({"ref": payload.ref} if large else {"data": b64encode(payload.data).decode()}),
    }


def _column(column: store_pb.Column) -> Any:
    match column.WhichOneof("value"):
        case "tensor":
            return tensors.from_proto(column.tensor).tolist()
        case "json":
            return json.loads(column.json)
        case "ref":
            return {"ref": column.ref}
    return None


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
