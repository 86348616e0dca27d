"""The task set: reasoning_gym datasets, split so that no question is shared between splits.

A query is addressed by (split, seed, index) and is a pure function of the three. The datasets are
procedural with finite pools (a word list, small numbers), so different seeds may well draw the same
question; the split is therefore decided by a digest of the question itself, not by the seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import reasoning_gym

Split = Literal["train", "dev", "held_out"]


@dataclass(frozen=True)
class TaskSpec:
    """One reasoning_gym dataset, its configuration, and a short wording of its questions."""

    dataset: str
    config: Mapping[str, Any]
    compact: Callable[[Mapping[str, Any]], str]


def _spell(entry: Mapping[str, Any]) -> str:
    return f"spell backward: {entry['metadata']['word']}"


def _palindrome(entry: Mapping[str, Any]) -> str:
    return "palindrome: " + " ".join(entry["metadata"]["letters"])


def _rotate(entry: Mapping[str, Any]) -> str:
    m = re.search(r"by (\d+) degrees clockwise:\n(.*)\n", entry["question"], re.S)
    assert m
    return f"rotate {m[1]}:\n{m[2]}"


def _sum(entry: Mapping[str, Any]) -> str:
    return f"{entry['metadata']['expression']} ="


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec("spell_backward", {"min_word_len": 3, "max_word_len": 6}, _spell),
    TaskSpec("palindrome_generation", {"min_length": 3, "max_length": 6}, _palindrome),
    TaskSpec("rotate_matrix", {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3}, _rotate),
    TaskSpec("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}, _sum),
)


@cache
def _dataset(k):
    s = SPECS[k]
    return reasoning_gym.create_dataset(s.dataset, seed=0, size=2**31, **s.config)


def split_of(q: str) -> Split:
    b = hashlib.sha256(q.encode()).digest()[0]
    return "held_out" if b < 40 else "dev" if b < 64 else "train"


class Tasks:
    def __init__(self, split, seed, only=None):
        self.split, self.seed = split, seed
        self.ks = only if only is not None else list(range(len(SPECS)))

    def __getitem__(self, i):
        k = self.ks[i % len(self.ks)]
        rng = random.Random(f"{self.seed}:{self.split}:{i}")
        while True:
            e = _dataset(k)[rng.randrange(2**31)]
            q = SPECS[k].compact(e)
            if split_of(q) == self.split:
                return {"dataset": SPECS[k].dataset, "k": k, "question": q, "answer": e["answer"], "entry": e}


def score(query, answer: str) -> float:
    return float(_dataset(query["k"]).score_answer(answer, query["entry"]))
