"""Monitors of the team that the turns of one trajectory determine, as metrics of the trajectory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from troupe.algorithms.team_monitors import agreement, copied_shares
from troupe.contracts.metric_names import ACCEPTS, AGREEMENT, COPYING
from troupe.job.sections.run import EvaluationSpec
from troupe.workflow import TurnRecord, scoring

# Longer trajectories are compared in a thread, to keep the event loop free.
_CHARS_AT_ONCE: Final = 8_192


async def monitored(
    turns: Sequence[TurnRecord], evaluation: EvaluationSpec | None
) -> dict[str, float]:
    """Return the monitors of an ended trajectory with several agents: `copying/<agent>`, and in an
    evaluation `agreement/<agent>` and `accepts/<judge>`."""
    said = [
        (turn.role.name, turn.reply.text)
        for turn in turns
        # A workflow may have assigned anything to it.
        if turn.reply is not None and isinstance(turn.reply.text, str)
    ]
    if not said:
        return {}
    task = [content for _, content in turns[0].messages]
    if sum(len(text) for text in (*task, *(text for _, text in said))) <= _CHARS_AT_ONCE:
        copied = copied_shares(said, task)
    else:
        copied = await asyncio.to_thread(copied_shares, said, task)
    found = {f"{COPYING}{agent}": share for agent, share in copied.items()}
    if evaluation is None:
        return found
    last = dict(said)
    if (pattern := evaluation.answer_pattern) is not None:
        answers = {
            agent: answer
            for agent, text in last.items()
            if (answer := scoring.match_of(pattern, text)) is not None
        }
        found |= {f"{AGREEMENT}{agent}": one for agent, one in agreement(answers).items()}
    for judge, accepts in evaluation.judges.items():
        if judge in last:
            found[f"{ACCEPTS}{judge}"] = float(re.search(accepts, last[judge]) is not None)
    return found
