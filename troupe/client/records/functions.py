"""Records of functions and their calls, and the error of a call that failed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from troupe.client.conversion import Record, word
from troupe.functions.costs import costs_of, schema_of
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc.errors import TroupeError
from troupe.v1 import reward_pb2 as reward_pb


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
