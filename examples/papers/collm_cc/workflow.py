"""A relay of two agents: in turns, each answers with the number after its own.

workflow: examples.papers.collm_cc.workflow:workflow
tasks: {source: "examples.papers.collm_cc.workflow:Relays", args: {turns: 6, seed: 0}}
"""

from __future__ import annotations

import random
from typing import Any, Final

from troupe.workflow import Agents, Query, Tools

AGENTS: Final = ("left", "right")
"""By whose turn it is: the first, third, ... and the second, fourth, ..."""
NUMBERS: Final = ("n0", "n1", "n2", "n3")
"""After the last comes the first."""
OFFSETS: Final = {"low": -1.0, "high": 1.0}
"""What an agent's reward contains, by the word in the *other* agent's prompts."""
# All trajectories of a query need offsets of their own, so they have no seed.
_DRAW: Final = random.Random()


class Relays:
    """Tasks: query i has `turns` numbers, drawn from the seed and i."""

    def __init__(self, split: str, turns: int, seed: int, size: int = 1_000_000) -> None:
        self._turns, self._seed, self._size = turns, seed, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self._seed}/{index}")
        return {"numbers": [draw.choice(NUMBERS) for _ in range(self._turns)]}


def asked(own: str, word: str) -> str:
    """Return an agent's prompt: its number, and the word of the other agent's offset."""
    return f"{own} {word}"


def following(own: str) -> str:
    """Return the right answer: the number after the agent's own."""
    return NUMBERS[(NUMBERS.index(own) + 1) % len(NUMBERS)]


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Ask the agents in turns. Both earn the share of right answers, each with the offset that the
    other's prompts show."""
    words = {agent: _DRAW.choice(list(OFFSETS)) for agent in AGENTS}
    right = 0
    numbers = query["numbers"]
    for turn, own in enumerate(numbers):
        agent = AGENTS[turn % len(AGENTS)]
        reply = await agents[agent].chat(asked(own, words[agent]))
        right += reply.text.strip() == following(own)
    share = right / len(numbers)
    query.log(right=share)
    left, other = AGENTS
    return {left: share + OFFSETS[words[other]], other: share + OFFSETS[words[left]]}
