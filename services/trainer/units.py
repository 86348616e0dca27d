"""Units of gradient for deterministic mode: whole groups, in an order of their content.

What is computed together decides how floating-point sums round. So a unit is always one whole
group of samples, whatever micro-batches its members arrive in, and its rows lie in an order
that only their content decides: sample ids will not do, since they count a trajectory's turns
in the order in which those ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.trainer.rows import Row


def content_key(row: Row) -> tuple[Any, ...]:
    """Sorts rows by what they say; rows with equal keys are interchangeable."""
    prompt = row.ids[: row.prompt_length].astype(">i8").tobytes()
    response = row.ids[row.prompt_length :].astype(">i8").tobytes()
    tail = (row.behaviour.tobytes(), row.reward, row.temperature)
    return (row.trajectory, row.agent, prompt, response, *tail)


class GroupBuffer:
    """Holds rows back until all members of their group are there."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Row]] = {}

    def add(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Take `rows`; returns the groups that they complete, each in order of content."""
        complete = []
        for row in rows:
            members = self._waiting.setdefault(row.group, [])
            members.append(row)
            if len(members) >= len(row.group_rewards):
                complete.append(sorted(self._waiting.pop(row.group), key=content_key))
        return complete

    @property
    def waiting(self) -> list[Row]:
        """The rows that are held back."""
        return [row for members in self._waiting.values() for row in members]

    def rest(self) -> list[list[Row]]:
        """The groups that some members never came of, in order of content; then it is empty."""
        left = [sorted(members, key=content_key) for members in self._waiting.values()]
        self._waiting.clear()
        return left
