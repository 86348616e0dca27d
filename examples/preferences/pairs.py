"""Pairs for the example team: a right answer preferred to one with letters exchanged."""

from __future__ import annotations

import random
from typing import Any, Literal

from troupe.demo.tasks import TeamTasks
from troupe.demo.workflow import criticise, propose


class Pairs:
    """Row i is a question with two answers: for the solver if i is even, else for the
    checker."""

    def __init__(self, split: Literal["train"], size: int = 100_000) -> None:
        self._tasks, self._size = TeamTasks(split, seed=1_000_000), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        query = self._tasks[index // 2]
        question, answer = query["question"], query["answer"].lower()
        wrong = _spoiled(answer, random.Random(index))
        return {
            "prompt": criticise(question, wrong) if index % 2 else propose(question),
            "chosen": answer,
            "rejected": wrong,
            "agent": "checker" if index % 2 else "solver",
        }


def _spoiled(answer: str, draw: random.Random) -> str:
    """Exchange two different letters of the answer; if there are none, add a letter."""
    letters = list(answer)
    places = [(i, j) for i in range(len(letters)) for j in range(i) if letters[i] != letters[j]]
    if not places:
        return answer + draw.choice("abcdefgh")
    i, j = draw.choice(places)
    letters[i], letters[j] = letters[j], letters[i]
    return "".join(letters)
