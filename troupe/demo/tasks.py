"""The task set: three kinds of small puzzles, split so that no question is shared between splits.

A query is addressed by (split, seed, index) and is a pure function of the three. The puzzles are
drawn from finite pools (a word list, small numbers), so different seeds may well draw the same
question; the split is therefore decided by a digest of the question itself, not by the seed.

The puzzles come from three datasets of reasoning_gym (Apache-2.0); `words.txt` has the four-letter
words of its list, without offensive ones. They are written out here because reasoning_gym
cannot be installed without a C compiler.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

Split = Literal["train", "dev", "held_out"]
# A question and its answer, as a generator draws them.
Puzzle = tuple[str, str]
Matrix = list[list[int]]

# Of 256 digests: the held-out and the dev share; the rest is for training.
_HELD_OUT: Final = 40
_DEV: Final = 24

# Held-out questions are the same for every seed of a job, so that runs can be compared.
_HELD_OUT_SEED: Final = 12345

# The least and the most rows (and columns), operations of one question, and quarter turns.
_ROWS: Final = (2, 2)
_OPERATIONS: Final = (1, 1)
_TURNS: Final = (1, 3)


@cache
def _words() -> list[str]:
    return (Path(__file__).parent / "words.txt").read_text().split()


def _spell_backward(draw: random.Random) -> Puzzle:
    word = draw.choice(_words())
    return f"spell backward: {word}", word[::-1]


def _matrix(draw: random.Random, rows: int, columns: int) -> Matrix:
    return [[draw.randint(0, 9) for _ in range(columns)] for _ in range(rows)]


def _text(matrix: Matrix) -> str:
    return "\n".join(" ".join(map(str, row)) for row in matrix)


def _transposed(matrix: Matrix) -> Matrix:
    return [list(row) for row in zip(*matrix, strict=True)]


_MIRRORINGS: Final[Mapping[str, Callable[[Matrix], Matrix]]] = {
    "horizontally mirror the matrix": lambda rows: rows[::-1],
    "vertically mirror the matrix": lambda rows: [row[::-1] for row in rows],
    "mirror the matrix along the diagonal": _transposed,
    "mirror the matrix along the counterdiagonal": lambda rows: _transposed(
        [row[::-1] for row in rows[::-1]]
    ),
}


def _manipulate_matrix(draw: random.Random) -> Puzzle:
    matrix = _matrix(draw, draw.randint(*_ROWS), draw.randint(*_ROWS))
    operations = draw.choices(list(_MIRRORINGS), k=draw.randint(*_OPERATIONS))
    answer = matrix
    for operation in operations:
        answer = _MIRRORINGS[operation](answer)
    return f"{', '.join(operations)}:\n{_text(matrix)}", _text(answer)


def _rotate_matrix(draw: random.Random) -> Puzzle:
    size = draw.randint(*_ROWS)
    matrix = _matrix(draw, size, size)
    turns = draw.randint(*_TURNS)
    answer = matrix
    for _ in range(turns):
        answer = _transposed(answer[::-1])
    return f"rotate {90 * turns} degrees:\n{_text(matrix)}", _text(answer)


TASKS: Final[Mapping[str, Callable[[random.Random], Puzzle]]] = {
    "spell_backward": _spell_backward,
    "manipulate_matrix": _manipulate_matrix,
    "rotate_matrix": _rotate_matrix,
}


def split_of(question: str) -> Split:
    """Which split a question belongs to, whoever draws it and however it is capitalised."""
    digest = hashlib.sha256(question.lower().encode()).digest()[0]
    if digest < _HELD_OUT:
        return "held_out"
    return "dev" if digest < _HELD_OUT + _DEV else "train"


class TeamTasks:
    """Queries of one split: {"dataset", "question", "answer"}. Index i is of dataset i modulo their
    number.
    """

    def __init__(
        self, split: Split, seed: int = 0, size: int = 1_000_000, only: str | None = None
    ) -> None:
        """`only` restricts to one dataset of `TASKS`."""
        self._split = split
        self._seed = _HELD_OUT_SEED if split == "held_out" else seed
        self._size = size
        self._datasets = [only] if only else list(TASKS)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        dataset = self._datasets[index % len(self._datasets)]
        draw = random.Random(f"{self._seed}:{self._split}:{index}")
        while True:
            question, answer = TASKS[dataset](random.Random(draw.randrange(2**31)))
            if split_of(question) == self._split:
                return {"dataset": dataset, "question": question, "answer": answer}


def score(answer: str, answers: Sequence[str]) -> list[float]:
    """1.0 for each of `answers` that equals the right `answer`, else 0.0; upper case and the width
    of spaces do not count.

    The tool of the workflow: all answers of a trajectory in one call.
    """
    right = _entries(answer)
    return [float(_entries(given) == right) for given in answers]


def _entries(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().lower().splitlines()]
