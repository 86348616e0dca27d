"""What a worker's answers, and its silence, mean for a call."""

from __future__ import annotations

import contextlib
from typing import Final

from services.reward import worker
from services.reward.call import Outcome
from troupe.v1 import reward_pb2 as pb

_KINDS: Final = {
    worker.RAISED: pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: pb.InvocationError.KIND_NOT_IMPORTABLE,
    worker.BAD_ARGUMENTS: pb.InvocationError.KIND_BAD_ARGUMENTS,
}


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
        return Outcome(answer.text, seconds, cold_seconds=cold_seconds)
    text, retry_after = answer.text, 0.0
    if answer.kind == worker.REFUSED:
        said, _, text = answer.text.partition(" ")
        with contextlib.suppress(ValueError):
            retry_after = float(said)
    # What a sandbox answers is only a text; it may name a kind that there is not.
    return Outcome(
        error=pb.InvocationError(
            kind=_KINDS.get(answer.kind, pb.InvocationError.KIND_RAISED),
            message=text,
            traceback=answer.traceback,
            output=output,
            retry_after_seconds=retry_after,
        ),
        cold_seconds=cold_seconds,
    )
