"""A workflow that notes in a file which process plays which trajectory, from start to end.

Services import it by name (`tests.support.noted_turns`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Questions:
    """Questions that are all alike, played in `turns` turns and noted in the file `notes`."""

    def __init__(self, split: str, notes: str, turns: int = 4) -> None:
        self._values = {"notes": notes, "turns": turns}

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **self._values}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Turns of one conversation. The first reply follows from the trajectory's seed: its name."""
    messages: list[Any] = []
    name = ""
    for turn in range(query["turns"]):
        messages.append({"role": "user", "content": f"Question {query['index']}, turn {turn}?"})
        messages.append(await agents["player"].chat(messages))
        if not turn:
            name = f"{query['index']}-{hash(tuple(messages[-1].token_ids))}"
            note(query["notes"], "start", name)
    note(query["notes"], "end", name)
    return {"player": 0.0}


def note(path: str, what: str, name: str) -> None:
    """Appends a line; lines of several processes do not mix."""
    with Path(path).open("a") as file:
        file.write(f"{what} {name} {os.getpid()}\n")


@dataclass(frozen=True)
class Noted:
    """A process's note that a trajectory began there, or ended."""

    what: str
    name: str
    pid: int


def noted(path: Path) -> list[Noted]:
    """All notes so far, in order."""
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [Noted(what, name, int(pid)) for what, name, pid in lines]
