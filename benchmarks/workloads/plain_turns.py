"""Turns and nothing else: what lies between a workflow and its engine is all that takes time.

`ask` asks single questions one after another, each turn a conversation of its own; `talk` goes on
with one conversation. What is said means nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Queries:
    """Questions that differ from each other, `turns` per trajectory."""

    def __init__(
        self, split: str, turns: int = 4, words: int = 16, step_seconds: float = 0.0
    ) -> None:
        self._turns, self._words, self._step_seconds = turns, words, step_seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "questions": [question(index, turn, self._words) for turn in range(self._turns)],
            "step_seconds": self._step_seconds,
        }


def question(index: int, turn: int, words: int) -> str:
    """The prompt of a turn; no two begin alike."""
    return " ".join(f"{index}.{turn}.{word}" for word in range(words))


async def ask(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """One question after another. Notes what each turn took beyond its tokens' model time."""
    for number, text in enumerate(query["questions"]):
        began = time.perf_counter()
        reply = await agents["player"].chat([{"role": "user", "content": text}])
        taken = time.perf_counter() - began
        added = taken - len(reply.token_ids) * query["step_seconds"]
        query.log(**{f"added_{number}": added})  # type: ignore[attr-defined]
    return {"player": 0.0}


async def talk(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """One conversation, longer with every turn."""
    messages: list[Any] = []
    for text in query["questions"]:
        messages.append({"role": "user", "content": text})
        messages.append(await agents["player"].chat(messages))
    return {"player": 0.0}
