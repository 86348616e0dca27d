"""Calls of functions: arguments, time limits, outcomes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import xxhash

from services.reward import worker
from troupe.outcomes import finite_number, parse_json
from troupe.scheduling.elastic import Kin
from troupe.v1 import reward_pb2 as reward_pb

# A call that waits for a quota fails with the reason this long before its caller's deadline, but at
# most this share of the caller's time before it.
_NOTICE_SECONDS: Final = 1.0
_NOTICE_SHARE: Final = 0.1
_ERROR_KINDS: Final = {
    worker.RAISED: reward_pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: reward_pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: reward_pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: reward_pb.InvocationError.KIND_NOT_IMPORTABLE,
    worker.BAD_ARGUMENTS: reward_pb.InvocationError.KIND_BAD_ARGUMENTS,
}
_MAX_REWARD_BYTES: Final = 1 << 20
# Overhead of a response in the message of its batch.
_FRAME_BYTES: Final = 6
# Space for the error that replaces an oversized result.
_REFUSAL_BYTES: Final = 256


@dataclass(frozen=True)
class CallDeadline:
    """The time limits of one invocation, made when it is accepted and carried with the call through
    the queue and the host to its executor.

    `run_seconds` is the function's `timeout_seconds`. It bounds one attempt, and counts only while
    the function's code runs, not in the queue or while a worker starts or imports. The executor
    enforces it and reports `timed_out`.

    `caller_seconds` is the caller's total waiting time from acceptance, over all attempts; None
    without a deadline. gRPC ends the caller's wait. A call that has not begun is then dropped; a
    running call continues, for a caller that repeats the invocation id.
    """

    run_seconds: float = math.inf
    caller_seconds: float | None = None
    accepted: float = field(default_factory=time.perf_counter)

    @property
    def notice_seconds(self) -> float | None:
        """Seconds until a call that still waits for a quota is failed with the reason, a little
        before its caller gives up; None: the caller has no deadline."""
        if self.caller_seconds is None:
            return None
        notice = min(_NOTICE_SECONDS, _NOTICE_SHARE * self.caller_seconds)
        return self.accepted + self.caller_seconds - notice - time.perf_counter()

    def timed_out(self, output: str = "") -> reward_pb.InvocationError:
        """Return the error of a call whose code ran for longer than `run_seconds`."""
        return reward_pb.InvocationError(
            kind=reward_pb.InvocationError.KIND_TIMEOUT,
            message=f"did not end within {self.run_seconds:g} s",
            output=output,
        )


@dataclass(eq=False)
class FunctionCall:
    """A call's arguments, the job and trajectory that it is for, its priority and time limits."""

    arguments_json: str
    job_id: str = ""
    trajectory_id: str = ""
    query_id: str = ""
    # Called with each part of the function's output as it arrives.
    printed: Callable[[bytes], None] | None = None
    # Ids of stateful sandboxes that the trajectory has had.
    sandboxes: Sequence[str] = ()
    # Variables that the worker process has while the call runs.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Number of trajectories that wait for the result.
    waiters: int = 1
    # Priority (highest first), and the job's share relative to other jobs.
    priority: int = 0
    weight: float = 1.0
    deadline: CallDeadline = field(default_factory=CallDeadline)
    # Run time with the fewest cores, as the caller or the function declares it; 0: not declared.
    expected_seconds: float = 0.0
    # The same, estimated from similar calls; 0: as for the function's other calls.
    estimated_seconds: float = 0.0
    # Withdrawn: if it has not begun, it is skipped.
    dropped: bool = False

    @cached_property
    def kin(self) -> Kin:
        """Keys of similar calls of the function: same query, same trajectory, same arguments."""
        query = f"{self.job_id}/{self.query_id}" if self.query_id else ""
        trajectory = f"{self.job_id}/{self.trajectory_id}" if self.trajectory_id else ""
        # Arguments of another job's call may name another job's files.
        content = xxhash.xxh3_128_hexdigest(f"{self.job_id}/{self.arguments_json}".encode())
        return Kin(query, trajectory, content)


@dataclass(frozen=True)
class CallOutcome:
    """Outcome of one call: `result_json` after `seconds` of running, or `error`.

    `cold_seconds`: how long a worker took to start and to import the code; 0 for a warm worker.
    """

    result_json: str = ""
    seconds: float = 0.0
    error: reward_pb.InvocationError | None = None
    cold_seconds: float = 0.0
    # Id of the stateful sandbox in which the call ran, or which has ended.
    sandbox: str = ""

    @classmethod
    def failed(
        cls,
        kind: reward_pb.InvocationError.Kind.ValueType,
        message: str,
        *,
        cold_seconds: float = 0.0,
    ) -> CallOutcome:
        """Return the outcome of a call that failed without any output of its own."""
        error = reward_pb.InvocationError(kind=kind, message=message)
        return cls(error=error, cold_seconds=cold_seconds)


def outcome_of(
    answer: worker.CallAnswer, seconds: float = 0.0, output: str = "", cold_seconds: float = 0.0
) -> CallOutcome:
    """Return the outcome of a call that a worker answered after `seconds`; `output` is what it
    printed."""
    if answer.kind == worker.OK:
        return CallOutcome(sendable(answer.text), seconds, cold_seconds=cold_seconds)
    text, retry_after = sendable(answer.text), 0.0
    if answer.kind == worker.REFUSED:
        number, _, text = answer.text.partition(" ")
        with contextlib.suppress(ValueError):
            # A forged answer may contain any number; an implausible one counts as none.
            given = float(number)
            retry_after = given if 0 < given <= worker.MOST_SECONDS else -1.0
    return CallOutcome(
        error=reward_pb.InvocationError(
            # A forged answer may name a kind that does not exist.
            kind=_ERROR_KINDS.get(answer.kind, reward_pb.InvocationError.KIND_RAISED),
            message=text,
            traceback=sendable(answer.traceback),
            output=output,
            retry_after_seconds=retry_after,
        ),
        cold_seconds=cold_seconds,
    )


def sendable(text: str) -> str:
    """Convert `text` for protobuf: file names that are not UTF-8 contain halves of surrogate
    pairs."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_reward(outcome: CallOutcome) -> CallOutcome:
    """Return `outcome`, or KIND_BAD_RESULT if its result is neither a number nor numbers by
    agent."""
    if outcome.error is not None or _is_reward(outcome.result_json):
        return outcome
    shown = outcome.result_json
    shown = shown if len(shown) < 200 else shown[:197] + "..."
    error = reward_pb.InvocationError(
        kind=reward_pb.InvocationError.KIND_BAD_RESULT,
        message="a reward is a finite number, or a dict with a number for each agent that it is "
        f"for: the function returned {'nothing' if shown == 'null' else shown}",
    )
    return replace(outcome, result_json="", error=error)


def _is_reward(text: str) -> bool:
    # A sandbox may answer anything.
    if len(text) > _MAX_REWARD_BYTES:
        return False
    try:
        value = parse_json(text)
        for number in value.values() if isinstance(value, dict) else [value]:
            if isinstance(number, bool):
                return False
            finite_number(number)
    except ValueError:
        return False
    return True


def fitted(
    responses: Iterable[reward_pb.InvokeResponse], most_bytes: int
) -> list[reward_pb.InvokeResponse]:
    """Fit `responses` into one message of at most `most_bytes`.

    In order, each response that does not fit together with the earlier ones becomes
    KIND_RESULT_TOO_LARGE; the others are kept.
    """
    given = list(responses)
    left = most_bytes
    if sum(one.ByteSize() + _FRAME_BYTES for one in given) <= left:
        return given
    left -= len(given) * _REFUSAL_BYTES
    found = []
    for one in given:
        size = one.ByteSize() + _FRAME_BYTES
        if size > left and size > _REFUSAL_BYTES:
            found.append(_too_large(one, size, most_bytes))
        else:
            left -= max(0, size - _REFUSAL_BYTES)
            found.append(one)
    return found


def _too_large(
    response: reward_pb.InvokeResponse, size: int, most: int
) -> reward_pb.InvokeResponse:
    error = reward_pb.InvocationError(
        kind=reward_pb.InvocationError.KIND_RESULT_TOO_LARGE,
        message=f"its result of {size:,} bytes does not fit into the batch's answer of at most "
        f"{most:,}: invoke with the same id alone, or send fewer together",
    )
    refused = reward_pb.InvokeResponse()
    refused.CopyFrom(response)
    refused.error.CopyFrom(error)
    refused.host = refused.sandbox = ""
    return refused
