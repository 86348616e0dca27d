"""Which engine of a policy serves a turn.

Sticky by trajectory, because the engine that served a conversation holds its prefix; else least
outstanding work, counted in tokens because answers differ 5-9x in length; ties rotated, because
fresh engines all look alike and the first of them would get everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A conversation that moves is read again from its beginning. Staying pays while the wait that it
# costs is shorter than that: up to half more work than the least loaded engine has, and for short
# queues up to about the prompt of a long conversation.
STICKY_RATIO = 1.5
STICKY_SLACK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine that could serve now.

    `outstanding_tokens`: prompt tokens to read and response tokens still allowed, summed over the
    turns given to it; `in_flight`: their number; `limit`: how many it may have.
    """

    engine_id: str
    in_flight: int
    outstanding_tokens: int
    limit: int


def choose_engine(
    candidates: Sequence[Candidate], *, sticky: str | None = None, rotation: int = 0
) -> str | None:
    """The engine for the next turn, or None: none has room, so the turn waits.

    `sticky` is the engine that served the trajectory before; `rotation` is any number that grows
    by one with every choice. Candidates come in a fixed order.
    """
    open_ = [c for c in candidates if c.in_flight < c.limit]
    if not open_:
        return None
    least = min((c.outstanding_tokens, c.in_flight) for c in open_)
    for candidate in open_:
        if candidate.engine_id == sticky and not overloaded(candidate, least[0]):
            return candidate.engine_id
    ties = [c for c in open_ if (c.outstanding_tokens, c.in_flight) == least]
    return ties[rotation % len(ties)].engine_id


def overloaded(candidate: Candidate, least_tokens: int) -> bool:
    """Whether an engine has so much more to do than the least loaded that turns move away."""
    return candidate.outstanding_tokens > STICKY_RATIO * least_tokens + STICKY_SLACK_TOKENS
