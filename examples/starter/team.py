"""The workflow: two agents answer a question, the second after the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


async def solve(
    query: Mapping[str, Any], agents: Mapping[str, Any], tools: Any
) -> dict[str, float]:
    """Play one trajectory; return a reward for each agent, and for the team.

    `query` is a row of tasks.jsonl. Agents know only what they are told here.
    """
    first = await agents["solver"].chat(query["question"])
    final = await agents["checker"].chat(f"{query['question']} {first.text}")
    right = score(query["answer"], final.text)
    return {"solver": score(query["answer"], first.text), "checker": right, "team": right}


def score(answer: str, said: str) -> float:
    """Return 1 for the right answer, else 0."""
    return float(said.strip() == answer)
