"""Errors of single turns."""

from __future__ import annotations

from services.rollout.engines.errors import BadTurn, ReplyBroken
from services.rollout.engines.sglang.client import Refused
from services.rollout.engines.turns import Turn


def broken(engine_id: str, turn: Turn, error: Exception) -> ReplyBroken:
    """The server lives, its answer is of no use."""
    return ReplyBroken(engine_id, turn.request_id, str(error))


def refused(engine_id: str, turn: Turn, error: Refused) -> Exception:
    """The server said no: by its own fault, or because of what was asked."""
    if error.status >= 500:
        return broken(engine_id, turn, error)
    return BadTurn(
        f"engine {engine_id} refused the turn: {error.message}",
        field="request_id",
        value=turn.request_id,
        remedy="See the server's message; its limits are in its log.",
    )
