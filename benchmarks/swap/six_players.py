"""Six agents of one policy each, which all speak once in every query.

The texts are meaningless: simulated engines generate them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Final

AGENTS: Final = ("ada", "ben", "cleo", "dan", "eva", "finn")


class Queries:
    """Tasks of about a hundred tokens."""

    def __init__(self, split: str, size: int = 100_000) -> None:
        self._split, self._size = split, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Let all agents speak concurrently; each agent's reward is noise."""

    async def ask(agent: str) -> tuple[int, ...]:
        text = f"Task {query['index']}. You are {agent}. Say what should be done next, and why."
        reply = await agents[agent].chat([{"role": "user", "content": text}])
        return tuple(reply.token_ids)

    spoken = tuple(await asyncio.gather(*(ask(agent) for agent in AGENTS)))
    rng = random.Random(hash(spoken))
    return {agent: rng.random() for agent in AGENTS}
