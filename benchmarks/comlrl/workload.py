"""The work of both sides: a team of two, its task, its joint reward, its models.

A task is a word of eight letters. The first agent should write letters of its first half, and the
second agent letters of its second half; both earn the mean of their shares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.end_to_end.workload import AGENT, Size, Work, reward

# 0.36 million parameters.
MODEL: Final = Size(128, 2, 4, 320)
AGENTS: Final = (AGENT, f"{AGENT}-1")
# As AdamW of torch, which CoMLRL uses; gradients are not clipped.
FULL: Final = Work(steps=60, lr=1e-3, beta2=0.999, max_grad_norm=1e9)


def team_reward(question: str, texts: Sequence[str]) -> float:
    """Return the joint reward of both agents' texts, in [0, 1]."""
    half = len(question) // 2
    parts = (question[:half], question[half:])
    return sum(reward(part, text) for part, text in zip(parts, texts, strict=True)) / len(parts)


async def speak_together(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Run both agents concurrently; reward each with the team's reward."""
    question = query["question"]
    replies = await asyncio.gather(*(agents[name].chat(question) for name in AGENTS))
    return dict.fromkeys(AGENTS, team_reward(question, [reply.text for reply in replies]))
