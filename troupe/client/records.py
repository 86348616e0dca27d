"""Frozen records of jobs, clusters, functions and samples, job events, and the SDK's own errors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

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

    @property
    def number(self) -> int:
        """The wire's number."""
        return int(common_pb.JobState.Value(f"JOB_STATE_{self.upper()}"))

    @property
    def ended(self) -> bool:
        """Whether the job has succeeded, failed or been cancelled; it may still be resumable."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def resumable(self) -> bool:
        """Whether the orchestrator would accept a resume."""
        return states.allowed(states.JOB, self.number, common_pb.JOB_STATE_SUBMITTED)


@dataclass(frozen=True)
class ResolvedSetting(Record):
    """A setting that the job may leave open, as a worker resolved it."""

    field: str
    value: str
    # "given", "checkpoint", or the class of the device.
    source: str


@dataclass(frozen=True)
class Interval(Record):
    """A 95 % confidence interval."""

    low: float
    high: float


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
    # By field; of one field several where workers differ.
    resolved: tuple[ResolvedSetting, ...] = ()
    split_hint: str = ""
    """Which change of its engines or trainers would shorten its steps; empty: none."""
    before_intervals: dict[str, Interval] = field(default_factory=dict)
    """Intervals of the scores in `before`, by score."""
    after_intervals: dict[str, Interval] = field(default_factory=dict)
    """Intervals of the scores in `after`, by score."""
    spec_json: str = field(repr=False, default="")

    @property
    def signal_steps(self) -> dict[str, int]:
        """How many of the steps so far had a signal, by trained policy: the policy was updated, and
        not all advantages were zero."""
        found = {policy: self.metrics.get(f"{policy}/{SIGNAL_STEPS}") for policy in self.versions}
        return {policy: int(count) for policy, count in found.items() if count is not None}

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
    # "applied", "skipped", "empty"; "restarted" for the first weights again; "" for version 0.
    outcome: str

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """From the wire."""
        if message.restarted:
            given["outcome"] = "restarted"
        return super().of(message, **given)


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint of a policy, on the disk of its trainer's machine, that `transformers` loads."""

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
    # (role, content) of each message of the prompt.
    messages: tuple[tuple[str, str], ...]
    response: str
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    reward: float | None

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """From the wire."""
        messages = tuple((one.role, one.content) for one in message.messages)
        return super().of(message, messages=messages, **given)


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
        """From the wire."""
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
        """Why a job whose steps are all done trained nothing: no policy was updated, or
        trajectories had no turns. None for a plain success."""
        return self.job.problem

    @property
    def metrics(self) -> dict[str, float]:
        """Newest value of every metric."""
        return self.job.metrics


class JobFailed(FailedPrecondition):
    """The job ended without a result; `job` is its last record.

    Field, value and remedy are those of the problem that ended it.
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
            remedy=f"`troupe jobs resume {job.id}` goes on from its last committed step.",
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
    # Of trainers: how many policies it may hold at once (0: any number), and the fraction of the
    # last seconds in which it computed.
    slots: int | None = None
    utilization: float | None = None
    # Name of the node that it belongs to; empty: none started it.
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
    # The last weight update: how weights came in, seconds without service, and in all.
    update_way: str = ""
    update_exposed_seconds: float = 0.0
    update_seconds: float = 0.0


@dataclass(frozen=True)
class Binding(Record):
    """A policy that holds training devices, or waits for some (`suspended`)."""

    job_id: str
    policy: str
    state: str
    version: int
    step: int
    samples: int
    # Suspended on another worker; its training state is already on this one.
    prefetched: bool = False
    # How often it was swapped in or out here, and for how many seconds that kept the device idle.
    swaps: int = 0
    swap_seconds: float = 0.0
    # Of the checkpoint that is being written, or of the last one: bytes that are, and all of them.
    checkpoint_written_bytes: int = 0
    checkpoint_bytes: int = 0
    # While the ranks of a gang load the model: bytes of it that they have, and all of them.
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
    # As its driver reports; None for a declared device.
    used_bytes: int | None
    utilization: float | None
    # The process that it was given to; empty: none.
    process: str
    # What computes on it: "JOB/POLICY" of a trainer, or an engine's id.
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
    # Trajectories that were admitted and have not ended, per job.
    in_flight: dict[str, int]
    # Number of trainer workers with which no policy would wait for another; 0: none is needed.
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
    """The value of a function call, or why it has none; a reply that is not JSON is an error."""
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
class Invocation(Record):
    """The outcome of a function call: a `value` or an `error`."""

    id: str
    value: Any
    error: InvocationFailed | None
    queue_seconds: float
    run_seconds: float
    # Time to start a worker and import the code; 0 where a warm worker took the call.
    cold_start_seconds: float
    cores: int
    # How many times the call was started.
    attempts: int
    # The host that it ran on; empty: that of the reward service.
    host: str = ""

    @classmethod
    def of_call(cls, name: str, invocation_id: str, reply: reward_pb.InvokeResponse) -> Self:
        """How the call `invocation_id` of the function `name` ended."""
        value, error = result_of(reply)
        failure = None if error is None else InvocationFailed(name, error)
        return cls.of(reply, id=invocation_id, value=value, error=failure)


@dataclass(frozen=True)
class InvocationProgress:
    """Progress of a function call that has not ended: "queued", "started" or "output"."""

    state: str
    # How many calls of the function are queued before it.
    ahead: int = 0
    attempt: int = 0
    cores: int = 0
    # The text that it printed since the last progress.
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
        """From the wire."""
        return super().of(message, at=datetime.fromtimestamp(message.seconds, UTC), **given)


@dataclass(frozen=True)
class Function(Record, part="function"):
    """A function of the reward service, with counts of its calls since the service started."""

    name: str
    version: str
    # "reward", "tool", or empty where not declared.
    kind: str
    entrypoint: str
    # Digest of its uploaded source; empty: its code is installed where the service runs.
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
        """Id of the job that it belongs to; empty for a deployed function."""
        return self.name.partition("/")[0] if "/" in self.name else ""

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """From the wire."""
        spec = message.function
        return super().of(message, parameters=schema_of(spec), costs=costs_of(spec), **given)


@dataclass(frozen=True)
class Sample(Record, id_from="sample_id"):
    """One trainable row (a turn) of one policy.

    When the sample's step is committed, its payload is freed: token ids and log-probs are None
    then, and `columns` is empty.
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

    @classmethod
    def of(cls, message: store_pb.Sample, **given: Any) -> Self:
        """From the wire. Raises `ChecksumError` for a damaged tensor."""
        there = message.HasField("response_ids")
        for name in ("prompt_ids", "response_ids", "logprobs"):
            given[name] = tensors.from_proto(getattr(message, name)).tolist() if there else None
        return super().of(
            message,
            version=min((span.version for span in message.versions), default=None),
            columns={name: _column(column) for name, column in message.columns.items()},
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
        """How many open steps this policy has not committed."""
        return max(0, self.newest_step - self.committed_step)


@dataclass(frozen=True)
class Tables(Record):
    """All tables of a job, and the memory use of the experience store."""

    tables: tuple[TableSummary, ...]
    payload_bytes: int
    # Payload bytes above which rollout is slowed down; 0: no limit is set.
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
    # Each contradiction in words; empty when there is none.
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
        """Samples that are neither trained nor dropped nor live."""
        return sum(one.lost for one in self.policies)

    @property
    def duplicated(self) -> int:
        """Uses of samples beyond what the job allows."""
        return sum(one.duplicated for one in self.policies)


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
    """The job moved to `state`; `problem`: why it failed, or what it waits for."""

    at: datetime
    state: JobState
    problem: TroupeError | None = None


@dataclass(frozen=True)
class MetricsLogged(Record):
    """Metrics of a step; a step may log several times, under different names."""

    at: datetime
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Notice(Record):
    """A message for people: a worker was lost, a step skipped, a trajectory dropped."""

    at: datetime
    severity: Literal["info", "warning", "error"]
    text: str

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """From the wire."""
        severity = word(orchestrator_pb.Notice.Severity.DESCRIPTOR, message.severity) or "info"
        return super().of(message, severity=severity, **given)


@dataclass(frozen=True)
class Activity(Record):
    """Progress inside a step, `done` of `total`. Not logged: only live watchers get it."""

    at: datetime
    text: str
    step: int
    total_steps: int
    done: float
    total: float


Event = StateChanged | MetricsLogged | Notice | Activity


def event_of(message: orchestrator_pb.JobEvent) -> Event | None:
    """The record of an event; None for a kind that this version does not know (a newer server)."""
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
