"""Errors of engines: what failed, and whether a turn may be repeated elsewhere.

`TurnLost` and its kin are `Unavailable`: the router repeats the turn, or goes on with it, on
another engine. `FailedPrecondition` and `InvalidArgument` are the job's to mend."""

from __future__ import annotations

import copy
from typing import TypeVar

from services.rollout.engines.requests import EngineResponse
from troupe.contracts import kinds
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)

LostT = TypeVar("LostT", bound="TurnLost")


class TurnLost(Unavailable):
    """The engine cannot finish a turn.

    `drawn`: the tokens that verified weights drew before the failure, if any. The router may
    continue the turn from them on another engine.
    """

    drawn: EngineResponse | None = None


def lost_turn(error: LostT, drawn: EngineResponse) -> LostT:
    """A copy of `error` for one turn, with the tokens drawn so far."""
    own = copy.copy(error)
    own.drawn = drawn
    return own


class EngineDied(TurnLost):
    """The engine's thread or process has ended or does not answer; its turns are lost."""

    default_kind = "engine_died"

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(
            f"the engine died: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn on another engine; this one serves again after a restart "
            "and a verified weight update.",
        )


class EngineStale(TurnLost):
    """The engine holds no verified weights, or is draining, and takes no turns."""

    default_kind = "engine_stale"

    def __init__(self, engine_id: str, state: str) -> None:
        super().__init__(
            f"the engine is {state} and takes no turns",
            field="engine",
            value=engine_id,
            remedy="Choose another engine of the policy, or update this one's weights first.",
        )


class EngineAsleep(FailedPrecondition):
    """The engine has released its memory and cannot work until `wake`."""

    default_kind = "engine_asleep"

    def __init__(self, engine_id: str, what: str) -> None:
        super().__init__(
            f"the engine is asleep: {what}",
            field="engine",
            value=engine_id,
            remedy="Wake it; it then needs a verified weight update before it serves.",
        )


class TurnReturned(Unavailable):
    """The engine returns a turn unfinished because it changes weights or goes to sleep."""

    default_kind = "turn_returned"

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(
            f"the turn was given back: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn on an engine that serves; nothing of it was used.",
        )


class EngineStartFailed(FailedPrecondition):
    """The engine could not be started; the message has the reason."""

    default_kind = "engine_start_failed"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for a response in the engine's context."""

    default_kind = "prompt_too_long"

    def __init__(self, policy: str, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"a prompt of {prompt_tokens} tokens leaves no room for a response in a context of "
            f"{max_context} tokens",
            field=f"policies.{policy}.engine.max_context",
            value=max_context,
            remedy="Shorten the conversation, or raise max_context up to what the model's "
            "positions allow.",
        )


class TurnDeadline(DeadlineExceeded):
    """The turn had no response within its deadline; the request was aborted."""

    default_kind = "turn_deadline"

    def __init__(self, engine_id: str, request_id: str, seconds: float, done: int) -> None:
        super().__init__(
            f"request {request_id} had {done} tokens after {seconds:g} s on engine {engine_id}",
            field="limits.turn_seconds",
            value=f"{seconds:g}",
            remedy="Allow more time per turn, fewer new tokens, or add engines.",
        )


class ScoreDeadline(DeadlineExceeded):
    """Continuations were not scored within the deadline."""

    default_kind = "score_deadline"

    def __init__(self, engine_id: str, count: int, seconds: float) -> None:
        super().__init__(
            f"{count} continuations were not scored within {seconds:g} s on engine {engine_id}",
            field="limits.turn_seconds",
            value=f"{seconds:g}",
            remedy="Allow more time per turn, or ask for fewer at once.",
        )


class ScoreRefused(FailedPrecondition):
    """The engine cannot compute these log-probs."""

    default_kind = "score_refused"


class BadTurn(InvalidArgument):
    """The request cannot be served by any engine of the policy."""

    default_kind = kinds.BAD_TURN


class ReplyBroken(Unavailable):
    """The engine is alive, but its answer to one turn is missing, cut off or refused."""

    default_kind = "engine_reply_broken"

    def __init__(self, engine_id: str, request_id: str, reason: str) -> None:
        super().__init__(
            f"no usable answer to request {request_id}: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn; the prompt and its tokens are unchanged.",
        )


class WeightsRefused(FailedPrecondition):
    """The published weights do not fit the engine's model, or differ from what was announced.

    The engine has not changed.
    """

    default_kind = "weights_refused"


class UpdateFailed(Unavailable):
    """A weight update failed half-way: the engine is STALE until one succeeds."""

    default_kind = "weight_update_failed"


class NonFiniteLogits(Internal):
    """The model computed NaN or infinite logits: its weights are broken."""

    default_kind = "non_finite_logits"

    def __init__(self, engine_id: str, version: int | None) -> None:
        super().__init__(
            f"engine {engine_id} computed logits that are not finite with version {version}",
            remedy="Look for a NaN in the published weights; roll back to an earlier version.",
        )


class ServerGone(Exception):
    """A model server's connection failed or broke: whether it acted on the call is unknown."""


class BrokenReply(Exception):
    """A model server's answer is not one that the call can have."""


class Refused(Exception):
    """A model server answered an error: its HTTP `status` and its own `message`."""

    def __init__(self, call: str, status: int, message: str) -> None:
        super().__init__(f"{call} answered {status}: {message}")
        self.status = status
        self.message = message
