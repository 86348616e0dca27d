"""Tasks and the reward of README's job on models with random weights: `my_tasks` there."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

_WORDS: Final = 12


class Tasks:
    """Questions of random words; the answer's share of words of the first half of the dictionary
    is the score, which every answer has some of."""

    def __init__(self, split: str, words: int) -> None:
        """`words`: in the dictionary."""
        self._split, self._words = split, words

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self._split} {index}")
        question = " ".join(f"w{draw.randrange(self._words)}" for _ in range(_WORDS))
        return {"question": question, "entry": {"words": self._words}}


def score(entry: Mapping[str, Any], answer: str) -> float:
    """Return the share of an answer's words that are in the first half of the dictionary."""
    words = [int(word[1:]) for word in answer.split() if word[:1] == "w" and word[1:].isdecimal()]
    return sum(2 * word < entry["words"] for word in words) / len(words) if words else 0.0
