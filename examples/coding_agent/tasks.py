"""Functions to write, with the tests that they must pass."""

from __future__ import annotations

import random
from typing import Any, Final

# The questions, and the right operations.
ASKED: Final = {
    "+": "Write solve(a, b): their sum.",
    "-": "Write solve(a, b): their difference.",
    "*": "Write solve(a, b): their product.",
}
TESTS: Final = """\
import pytest
from solution import solve

@pytest.mark.parametrize(("a", "b"), {pairs})
def test_solve(a, b):
    assert solve(a, b) == a {sign} b
"""


class Tasks:
    """Return query i of the split, a pure function of both."""

    def __init__(self, split: str, size: int = 100_000) -> None:
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self._split}/{index}")
        sign = draw.choice(sorted(ASKED))
        # The first pair distinguishes all three.
        pairs = [(3, 5), *((draw.randint(-9, 9), draw.randint(-9, 9)) for _ in range(3))]
        return {"task": ASKED[sign], "tests": TESTS.format(pairs=pairs, sign=sign)}
