"""Demonstrations for the example team: right answers for both agents, as rows of conversations."""

from __future__ import annotations

from typing import Any, Literal

from troupe.demo.tasks import TeamTasks
from troupe.demo.workflow import criticise, propose


class Rows:
    """Row i is a question with its answer: the solver's if i is even, else the checker's."""

    def __init__(self, split: Literal["train"], size: int = 100_000) -> None:
        self._tasks, self._size = TeamTasks(split, seed=1_000_000), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        query = self._tasks[index // 2]
        question, answer = query["question"], query["answer"].lower()
        prompt = criticise(question, answer) if index % 2 else propose(question)
        agent = "checker" if index % 2 else "solver"
        return {"messages": [*prompt, {"role": "assistant", "content": answer}], "agent": agent}
