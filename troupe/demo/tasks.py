"""The task set: reasoning_gym datasets, split so that no question is shared between splits.

A query is addressed by (split, seed, index) and is a pure function of the three. The datasets are
procedural with finite pools (a word list, small numbers), so different seeds may well draw the same
question; the split is therefore decided by a digest of the question itself, not by the seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import reasoning_gym

Split = Literal["train", "dev", "held_out"]

# Of 256 digests: the held-out and the dev share; the rest is for training.
_HELD_OUT: Final = 40
_DEV: Final = 24

# Held-out questions are the same for every seed of a job, so that runs can be compared.
_HELD_OUT_SEED: Final = 12345


@dataclass(frozen=True)
class TaskSpec:
    """One reasoning_gym dataset, its configuration, and a short wording of its questions."""

    dataset: str
    config: Mapping[str, Any]
    compact: Callable[[Mapping[str, Any]], str]


def _spell(entry: Mapping[str, Any]) -> str:
    return f"spell backward: {entry['metadata']['word']}"


def _rotate(entry: Mapping[str, Any]) -> str:
    found = re.search(r"by (\d+) degrees clockwise:\n(.*)\n", entry["question"], re.DOTALL)
    assert found is not None, entry["question"]
    return f"rotate {found[1]} degrees:\n{found[2]}"


def _manipulate(entry: Mapping[str, Any]) -> str:
    operation = entry["metadata"]["operations"][0]["instruction"].removeprefix("- ").lower()
    rows = "\n".join(" ".join(map(str, row)) for row in entry["metadata"]["matrix"])
    return f"{operation}:\n{rows}"


def _without(*operations: str) -> dict[str, int]:
    # reasoning_gym draws operations by weight; a weight below any drawn number never wins.
    return dict.fromkeys((f"w_{name}" for name in operations), -99)


TASKS: Final[tuple[TaskSpec, ...]] = (
    TaskSpec("spell_backward", {"min_word_len": 4, "max_word_len": 4}, _spell),
    TaskSpec(
        "manipulate_matrix",
        {
            **dict.fromkeys(("min_rows", "max_rows", "min_cols", "max_cols"), 2),
            **dict.fromkeys(("min_transforms", "max_transforms"), 1),
            **_without(
                "rotate",
                "map",
                "crop",
                "remove_every_nth_row",
                "remove_every_nth_col",
                "zero_divisible",
            ),
        },
        _manipulate,
    ),
    TaskSpec(
        "rotate_matrix",
        {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3},
        _rotate,
    ),
)


@cache
def _dataset(number: int) -> Any:
    spec = TASKS[number]
    return reasoning_gym.create_dataset(spec.dataset, seed=0, size=2**31, **spec.config)


def split_of(question: str) -> Split:
    """Which split a question belongs to, whoever draws it and however it is capitalised."""
    digest = hashlib.sha256(question.lower().encode()).digest()[0]
    if digest < _HELD_OUT:
        return "held_out"
    return "dev" if digest < _HELD_OUT + _DEV else "train"


class TeamTasks:
    """Queries of one split; index i is of dataset i modulo their number.

    Each is {"dataset", "question", "answer", "entry"}: `entry` is what reasoning_gym's own scorer
    takes, `question` its question in short words.
    """

    def __init__(
        self, split: Split, seed: int = 0, size: int = 1_000_000, only: Sequence[int] | None = None
    ) -> None:
        """`only` restricts to some numbers of `TASKS`."""
        self._split = split
        self._seed = _HELD_OUT_SEED if split == "held_out" else seed
        self._size = size
        self._numbers = tuple(only if only is not None else range(len(TASKS)))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._numbers[index % len(self._numbers)]
        spec = TASKS[number]
        draw = random.Random(f"{self._seed}:{self._split}:{index}")
        while True:
            entry = _dataset(number)[draw.randrange(2**31)]
            question = spec.compact(entry)
            if split_of(question) == self._split:
                return {
                    "dataset": spec.dataset,
                    "question": question,
                    "answer": entry["answer"],
                    "entry": entry,
                }


@cache
def _scorer(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    scorer: Callable[[str, Mapping[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return scorer


def score(dataset: str, entry: Mapping[str, Any], answers: Sequence[str]) -> list[float]:
    """1.0 for each answer that reasoning_gym scores as fully right, else 0.0.

    The tool of the workflow: all answers of a trajectory in one call.
    """
    return [float(_scorer(dataset)(answer.strip(), entry) == 1.0) for answer in answers]
