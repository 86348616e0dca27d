"""A team that real, tiny models learn within a dozen steps: speak the letter a.

The solver proposes, the checker criticises, the solver answers again; the reward is the share of
the letter a. It only serves to compare modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUESTIONS = "bcdefghijk"


class Queries:
    """Ten questions of two letters."""

    def __init__(self, split: str) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(_QUESTIONS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": _QUESTIONS[index] + "?"}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Play one exchange of the team."""
    question = {"role": "user", "content": query["question"]}
    draft = await agents["solver"].chat([question])
    critique = await agents["checker"].chat(query["question"] + draft.text)
    final = await agents["solver"].chat(
        [question, draft, {"role": "user", "content": critique.text}]
    )
    score = share_of_a(final.text)
    return {"solver": score, "checker": share_of_a(critique.text), "team": score}


def share_of_a(text: str) -> float:
    """Return the share of the letter a in `text`, in [0, 1]."""
    return text.count("a") / max(1, len(text))
