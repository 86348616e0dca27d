"""What the SDK returns about functions and their calls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from troupe.client.records import word
from troupe.functions.costs import costs_of, schema_of
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc.errors import TroupeError
from troupe.v1 import reward_pb2 as pb


class InvocationFailed(TroupeError):
    """A call that ended without a result. `kind` says how: "raised", "timeout", "out_of_memory",
    "worker_died", "bad_result", "cancelled", "not_importable", "quota_exhausted", ..."""

    default_kind: ClassVar[str] = "invocation_failed"

    def __init__(self, name: str, error: pb.InvocationError) -> None:
        super().__init__(
            f"{name}: {error.message}",
            kind=word(pb.InvocationError.Kind, error.kind) or None,
        )
        self.traceback = error.traceback
        """The last lines of the function's own traceback."""
        self.output = error.output
        """The last that it printed."""


def result_of(reply: pb.InvokeResponse) -> tuple[Any, pb.InvocationError | None]:
    """The value of a call, or why there is none: functions, and sandboxes, may answer anything."""
    if reply.WhichOneof("outcome") == "error":
        return None, reply.error
    try:
        return parse_json(reply.result_json), None
    except NotJsonError as error:
        return None, pb.InvocationError(
            kind=pb.InvocationError.KIND_BAD_RESULT,
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
    def of(cls, name: str, invocation_id: str, reply: pb.InvokeResponse) -> Invocation:
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
    def of(cls, line: pb.LogLine) -> LogLine:
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
    def of(cls, status: pb.FunctionStatus) -> Function:
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
