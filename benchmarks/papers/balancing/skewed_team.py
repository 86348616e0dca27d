"""Five agents that are called by Zipf's law: the k-th in proportion to 1/k, in every query.

The texts are meaningless: simulated engines generate them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.papers.pipeline.research_team import AGENTS, lognormal

# From the most frequently called: 44, 22, 15, 11 and 9 of a hundred calls.
_WEIGHTS: Final = tuple(1 / rank for rank in range(1, len(AGENTS) + 1))
# About 100 tokens with a tokenizer of characters.
_BRIEF: Final = "Task {index}, round {turn}. You are the {agent}. Say what the team should do next."


class Queries:
    """Tasks with a lognormal number of rounds."""

    def __init__(
        self, split: str, rounds: float = 6.0, sigma: float = 0.4, size: int = 100_000
    ) -> None:
        self._split, self._rounds, self._sigma, self._size = split, rounds, sigma, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._split}/{index}")
        return {"index": index, "rounds": max(1, round(lognormal(rng, self._rounds, self._sigma)))}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Make one call per round; each agent's reward is noise."""
    rng = random.Random(query["index"])
    for turn in range(query["rounds"]):
        [agent] = rng.choices(AGENTS, _WEIGHTS)
        text = _BRIEF.format(index=query["index"], turn=turn, agent=agent)
        reply = await agents[agent].chat([{"role": "user", "content": text}])
        if turn == 0:
            # From here on the group's members differ, each in the same way in every run.
            rng = random.Random(hash(reply.token_ids))
    return {agent: rng.random() for agent in AGENTS} | {"team": rng.random()}
