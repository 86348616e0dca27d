"""A team whose samples keep data for training by reference.

Imported by a rollout service, it has values of any size kept so: what the trainer reads of a sample
is as long as its response, and a tiny model's are short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

import services.rollout.trajectories.records
from tests.support.tiny_team import share_of_a

services.rollout.trajectories.records.INLINE_BYTES = 0  # type: ignore[misc]
# How long half of a step's trajectories take at least.
SLOW_SECONDS = 3.0


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """One turn of each, with log-probs of a reference; half of the questions take their time."""
    draft = await agents["solver"].chat(query["question"])
    critique = await agents["checker"].chat(draft.text or "?")
    for reply in (draft, critique):
        reply.columns["reference_logprobs"] = np.full(len(reply.token_ids), -1.0, np.float32)
    if query["question"][0] in "ace":
        await asyncio.sleep(SLOW_SECONDS)
    score = share_of_a(draft.text)
    return {"solver": score, "checker": share_of_a(critique.text), "team": score}
