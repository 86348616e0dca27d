"""The task is one short sentence about a topic: its prompts, topics and checks."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

FEWEST, MOST = 5, 8
_WORD: Final = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_SENTENCE: Final = re.compile(r"[^.!?\n]+[.!?]")

TOPICS: Final = tuple(Path(__file__).with_name("topics.txt").read_text().split())
# Topics for evaluations only.
_HELD_OUT: Final = 48


class Tasks:
    """Queries `{"topic", "request"}` of one split; no topic is in both."""

    def __init__(self, split: str) -> None:
        topics = list(TOPICS)
        random.Random(0).shuffle(topics)
        self._topics = topics[:_HELD_OUT] if split == "held_out" else topics[_HELD_OUT:]

    def __len__(self) -> int:
        return len(self._topics)

    def __getitem__(self, index: int) -> dict[str, Any]:
        topic = self._topics[index]
        return {"topic": topic, "request": f"Write one short sentence about a {topic}."}


def has(topic: str, text: str) -> bool:
    """Whether a reply has the topic's word."""
    return any(word in (topic, f"{topic}s", f"{topic}'s") for word in _words(text))


def kept(topic: str, text: str) -> dict[str, bool]:
    """Check which rules a reply follows: one whole sentence, the topic's word in it, its length."""
    return {
        "sentence": _SENTENCE.fullmatch(text.strip()) is not None,
        "topic": has(topic, text),
        "length": FEWEST <= len(_words(text)) <= MOST,
    }


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
