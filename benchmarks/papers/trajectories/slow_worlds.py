"""One agent in a slow environment: Gaussian steps, and occasional stalls or faults.

The environment is remote, like a service: its step is a wait without work on this machine. The wait
is drawn from the agent's first words, so that a trajectory meets the same world in every row.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Final

from troupe.workflow.errors import EnvironmentFault

AGENT: Final = "player"
# About 100 tokens with a tokenizer of characters.
_PROMPT: Final = "World {index}, turn {turn}. This is what you see after your move. What do you do?"
# Worlds that have failed once: the next attempt succeeds.
_mended: set[tuple[str, int, int]] = set()


class Worlds:
    """Equal tasks. A step takes `seconds` on average with standard deviation `sigma`, at least 0.
    In a share `stalls` of trajectories one step takes `stall_seconds` more, in a share `faults` one
    step fails. `row`: the job's name, since each world fails once per job."""

    def __init__(
        self,
        split: str,
        *,
        row: str,
        turns: int,
        seconds: float,
        sigma: float,
        stalls: float = 0.0,
        stall_seconds: float = 0.0,
        faults: float = 0.0,
        size: int = 100_000,
    ) -> None:
        self._size = size
        self._world = {
            "row": f"{split}/{row}",
            "turns": turns,
            "seconds": seconds,
            "sigma": sigma,
            "stalls": stalls,
            "stall_seconds": stall_seconds,
            "faults": faults,
        }

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **self._world}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Play the world's turns, each followed by a step of the environment. The reward is noise.
    Raises `EnvironmentFault`."""
    world = random.Random()
    stall = fault = -1
    key = ("", 0, 0)
    for turn in range(query["turns"]):
        text = _PROMPT.format(index=query["index"], turn=turn)
        reply = await agents[AGENT].chat([{"role": "user", "content": text}])
        if turn == 0:
            seed = hash(tuple(reply.token_ids))
            world = random.Random(seed)
            key = (query["row"], query["index"], seed)
            if world.random() < query["stalls"]:
                stall = world.randrange(query["turns"])
            if world.random() < query["faults"] and key not in _mended:
                fault = world.randrange(query["turns"])
        seconds = max(0.0, world.gauss(query["seconds"], query["sigma"]))
        await asyncio.sleep(seconds + (query["stall_seconds"] if turn == stall else 0.0))
        if turn == fault:
            _mended.add(key)
            raise EnvironmentFault("the world broke down", reason="died")
    return {AGENT: world.random()}
