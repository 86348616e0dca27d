"""Five agents around a planner, with the published skew and tails.

Every round the planner speaks, then the k-th of the query's agents with probability 1/k: within a
query the calls per agent follow Zipf's law, and the most frequently called specialist depends on
the query (a coding question needs the coder). The first specialist runs a slow tool. The number of
rounds of a query is lognormal. The texts are meaningless: simulated engines generate them.

Standard library only: the reward service's worker processes import this.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any, Final

PLANNER: Final = "planner"
SPECIALISTS: Final = ("coder", "critic", "searcher", "writer")
AGENTS: Final = (PLANNER, *SPECIALISTS)
# About 100 tokens with a tokenizer of characters.
_BRIEF: Final = "Task {index}, round {turn}. You are the {agent}. Say what the team should do next."


class Queries:
    """Tasks with different numbers of rounds: lognormal, `rounds` on average."""

    def __init__(
        self,
        split: str,
        rounds: float = 3.0,
        sigma: float = 0.5,
        tool_seconds: float = 0.2,
        tool_sigma: float = 1.0,
        size: int = 100_000,
    ) -> None:
        self._split, self._size = split, size
        self._rounds, self._sigma = rounds, sigma
        self._tool = (tool_seconds, tool_sigma)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._split}/{index}")
        rounds = lognormal(rng, self._rounds, self._sigma)
        return {
            "index": index,
            "rounds": max(1, round(rounds)),
            # From the most to the least frequently called agent.
            "agents": [PLANNER, *rng.sample(SPECIALISTS, len(SPECIALISTS))],
            "tool": self._tool,
        }


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Play the team's rounds; each agent's reward is noise."""
    rng = random.Random(query["index"])
    mean, sigma = query["tool"]
    for turn in range(query["rounds"]):
        for rank, agent in enumerate(query["agents"], start=1):
            if rng.random() >= 1 / rank:
                continue
            text = _BRIEF.format(index=query["index"], turn=turn, agent=agent)
            reply = await agents[agent].chat([{"role": "user", "content": text}])
            if turn == 0 and agent == PLANNER:
                # From here on the group's members differ, each in the same way in every run.
                rng = random.Random(hash(reply.token_ids))
            if rank == 2:
                await tools.call("run", seconds=lognormal(rng, mean, sigma))
    return {agent: rng.random() for agent in AGENTS} | {"team": rng.random()}


async def run(seconds: float) -> float:
    """Run the tool, which takes `seconds`."""
    await asyncio.sleep(seconds)
    return seconds


def lognormal(rng: random.Random, mean: float, sigma: float) -> float:
    """Draw from the lognormal distribution with this mean."""
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
