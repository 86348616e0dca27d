"""What can go wrong between the router and an engine."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)

if TYPE_CHECKING:
    from services.rollout.engines.base import Generation

LostT = TypeVar("LostT", bound="TurnLost")


class TurnLost(Unavailable):
    """The engine cannot end a turn. `drawn`: what it has of it, by verified weights, if anything:
    whoever asked may go on from there on another engine."""

    drawn: Generation | None = None


def lost_turn(error: LostT, drawn: Generation) -> LostT:
    """The same error for one turn."""
    own = copy.copy(error)
    own.drawn = drawn
    return own


class EngineDied(TurnLost):
    """The engine's thread or process is gone, or does not answer; its turns are lost."""

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
    """The engine holds no verified weights (or is leaving) and takes no turns."""

    default_kind = "engine_stale"

    def __init__(self, engine_id: str, state: str) -> None:
        super().__init__(
            f"the engine is {state} and takes no turns",
            field="engine",
            value=engine_id,
            remedy="Choose another engine of the policy, or update this one's weights first.",
        )


class EngineAsleep(FailedPrecondition):
    """The engine has given its memory back and can do nothing until it is woken."""

    default_kind = "engine_asleep"

    def __init__(self, engine_id: str, what: str) -> None:
        super().__init__(
            f"the engine is asleep: {what}",
            field="engine",
            value=engine_id,
            remedy="Wake it; it then needs a verified weight update before it serves.",
        )


class TurnReturned(Unavailable):
    """The engine gives the turn back unfinished: it changes weights or goes to sleep."""

    default_kind = "turn_returned"

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(
            f"the turn was given back: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn on an engine that serves; nothing of it was used.",
        )


class AdapterRefused(FailedPrecondition):
    """The engine cannot take, or does not have, this LoRA adapter; nothing changed."""

    default_kind = "adapter_refused"


class EngineStartFailed(FailedPrecondition):
    """The engine could not be brought up; the reason is in the message."""

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
    """No response within the turn's time; the request was aborted."""

    default_kind = "turn_deadline"

    def __init__(self, engine_id: str, request_id: str, seconds: float, done: int) -> None:
        super().__init__(
            f"request {request_id} had {done} tokens after {seconds:g} s on engine {engine_id}",
            field="limits.turn_seconds",
            value=f"{seconds:g}",
            remedy="Allow more time per turn, fewer new tokens, or add engines.",
        )


class ScoreDeadline(DeadlineExceeded):
    """Continuations were not scored in time."""

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

    default_kind = "bad_turn"


class ReplyBroken(Unavailable):
    """The engine lives, but this turn's answer is missing, cut off or refused."""

    default_kind = "engine_reply_broken"

    def __init__(self, engine_id: str, request_id: str, reason: str) -> None:
        super().__init__(
            f"no usable answer to request {request_id}: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn; the prompt and its tokens are unchanged.",
        )


class WeightsRefused(FailedPrecondition):
    """The published weights do not fit this engine's model, or are not what was announced.

    Nothing in the engine changed.
    """

    default_kind = "weights_refused"


class UpdateFailed(Unavailable):
    """The update broke off half-way: the engine is STALE until one succeeds."""

    default_kind = "weight_update_failed"


class NonFiniteLogits(Internal):
    """The model's output is NaN or infinite: the weights or the prompt are broken."""

    default_kind = "non_finite_logits"

    def __init__(self, engine_id: str, version: int | None) -> None:
        super().__init__(
            f"engine {engine_id} computed logits that are not finite with version {version}",
            remedy="Look for a NaN in the published weights; roll back to an earlier version.",
        )
