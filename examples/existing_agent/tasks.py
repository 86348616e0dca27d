"""Doors, with a letter behind each."""

from __future__ import annotations

import random

LETTERS = "abcd"


class Tasks:
    """Return query i of the split, a pure function of both."""

    def __init__(self, split: str, size: int = 100_000) -> None:
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"letter": random.Random(f"{self._split}/{index}").choice(LETTERS)}
