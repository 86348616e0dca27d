"""What a worker's answers, and its silence, mean for a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from services.reward import worker
from services.reward.call import Outcome
from troupe.outcomes import finite_number, parse_json
from troupe.v1 import reward_pb2 as pb

_KINDS: Final = {
    worker.RAISED: pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: pb.InvocationError.KIND_NOT_IMPORTABLE,
    worker.BAD_ARGUMENTS: pb.InvocationError.KIND_BAD_ARGUMENTS,
}

_MAX_REWARD_BYTES: Final = 1 << 20
# What a response costs in its batch beside its own bytes.
_FRAME_BYTES: Final = 6
# Room for the error that stands where a result did not fit.
_REFUSAL_BYTES: Final = 256


class Lost(Exception):
    """The worker is gone; `kind` says why, the text says it to people."""

    def __init__(
        self, kind: pb.InvocationError.Kind.ValueType, text: str, output: str = ""
    ) -> None:
        super().__init__(text)
        self.kind, self.output = kind, output


def outcome_of(
    answer: worker.Answer, seconds: float = 0.0, output: str = "", cold_seconds: float = 0.0
) -> Outcome:
    """What becomes of a call that a worker answered so after `seconds`; it printed `output`."""
    if answer.kind == worker.OK:
        return Outcome(sendable(answer.text), seconds, cold_seconds=cold_seconds)
    text, retry_after = sendable(answer.text), 0.0
    if answer.kind == worker.REFUSED:
        said, _, text = answer.text.partition(" ")
        with contextlib.suppress(ValueError):
            # A forged one may be anything; what is not plausible was not said.
            retry_after = seconds if 0 < (seconds := float(said)) <= worker.MOST_SECONDS else -1.0
    # What a sandbox answers is only a text; it may name a kind that there is not.
    return Outcome(
        error=pb.InvocationError(
            kind=_KINDS.get(answer.kind, pb.InvocationError.KIND_RAISED),
            message=text,
            traceback=sendable(answer.traceback),
            output=output,
            retry_after_seconds=retry_after,
        ),
        cold_seconds=cold_seconds,
    )


def fitted(responses: Iterable[pb.InvokeResponse], most_bytes: int) -> list[pb.InvokeResponse]:
    """`responses`, for one message of at most so many bytes.

    They are taken in their order; one that does not fit beside those before it is replaced by
    KIND_RESULT_TOO_LARGE, and fails nobody else.
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


def _too_large(response: pb.InvokeResponse, size: int, most: int) -> pb.InvokeResponse:
    error = pb.InvocationError(
        kind=pb.InvocationError.KIND_RESULT_TOO_LARGE,
        message=f"its result of {size:,} bytes does not fit into the batch's answer of at most "
        f"{most:,}: invoke with the same id alone, or send fewer together",
    )
    refused = pb.InvokeResponse()
    refused.CopyFrom(response)
    refused.error.CopyFrom(error)
    refused.host = refused.sandbox = ""
    return refused


def sendable(text: str) -> str:
    """`text` as protobuf takes it: names of files that are not UTF-8 come as halves of pairs."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_reward(outcome: Outcome) -> Outcome:
    """`outcome`, or KIND_BAD_RESULT where it is neither a number nor numbers by agent."""
    if outcome.error is not None or _is_reward(outcome.result_json):
        return outcome
    shown = outcome.result_json
    shown = shown if len(shown) < 200 else shown[:197] + "..."
    error = pb.InvocationError(
        kind=pb.InvocationError.KIND_BAD_RESULT,
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
