"""Turns only, so that the path between a workflow and its engine takes all the time.

`ask` asks single questions one after another, each turn a separate conversation; `talk` continues
one conversation. The texts are meaningless.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import cache
from typing import Any


class Queries:
    """Different questions, `turns` per trajectory."""

    def __init__(
        self,
        split: str,
        turns: int = 4,
        words: int = 16,
        step_seconds: float = 0.0,
        opening: int = 0,
        response: int = 0,
    ) -> None:
        """`opening`: words with which every conversation begins. `response`: mean tokens of a
        response, drawn by `response_tokens`; 0: the agent's sampling decides."""
        self._turns, self._words, self._step_seconds = turns, words, step_seconds
        self._opening, self._response = opening, response

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        turns = range(self._turns)
        return {
            "questions": [question(index, turn, self._words) for turn in turns],
            "lengths": [response_tokens(index, turn, self._response) for turn in turns],
            "step_seconds": self._step_seconds,
            "opening": history(self._opening) if self._opening else "",
        }


def question(index: int, turn: int, words: int) -> str:
    """Return the prompt of a turn; all prompts begin differently."""
    return " ".join(f"{index}.{turn}.{word}" for word in range(words))


def response_tokens(index: int, turn: int, mean: int) -> int:
    """Return the tokens of a turn's response, from half of `mean` to one and a half times it, so
    that turns that begin together end one after another, as in jobs. The same for the same turn."""
    return random.Random(f"{index}.{turn}").randint(mean // 2, mean * 3 // 2) if mean else 0


@cache
def history(words: int, seed: int = 0) -> str:
    """Return `words` words of a made-up language, the same for the same seed."""
    draw = random.Random(seed)
    known = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 5))) for _ in range(600)]
    return " ".join(draw.choices(known, k=words))


async def ask(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Ask one question after another; record each turn's time beyond its tokens' model time."""
    for number, (text, length) in enumerate(zip(query["questions"], query["lengths"], strict=True)):
        began = time.perf_counter()
        limit = {"max_new_tokens": length} if length else {}
        reply = await agents["player"].chat([{"role": "user", "content": text}], **limit)
        taken = time.perf_counter() - began
        added = taken - len(reply.token_ids) * query["step_seconds"]
        query.log(**{f"added_{number}": added})  # type: ignore[attr-defined]
    return {"player": 0.0}


async def talk(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Continue one conversation, which grows with every turn."""
    opening = query["opening"]
    messages: list[Any] = [{"role": "system", "content": opening}] if opening else []
    for text in query["questions"]:
        messages.append({"role": "user", "content": text})
        messages.append(await agents["player"].chat(messages))
    return {"player": 0.0}
