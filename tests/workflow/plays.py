"""Workflows, tasks and functions that tests of trying name."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class Sums:
    """{"question": "3+4", "answer": "7"}."""

    def __init__(self, split: str, size: int = 5) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}+4", "answer": str(index + 4)}


async def solve(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """A draft, a verdict, a score by a tool."""
    draft = await agents["solver"].chat(query["question"])
    verdict = await agents["checker"].chat(f"{query['question']} -> {draft.text}?", n=2)
    for reply in verdict:
        reply.reward = len(reply.text)
    right = await tools.call("score", text=draft.text, answer=query["answer"])
    query.log(length=len(draft.text))
    return {"solver": right, "team": right}


async def fails(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat("begin")
    return _deeper(query)


def _deeper(query: Any) -> dict[str, float]:
    return {"solver": 1 / (query.index * 0)}


async def sleeps(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat("begin")
    await asyncio.sleep(3600)
    return {}


async def blocks(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    time.sleep(3600)  # noqa: ASYNC251 - the fault under test
    return {}


async def exits(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat("begin")
    raise SystemExit(3)


async def cancels_itself(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    raise asyncio.CancelledError


async def refuses_to_end(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def uses(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat("begin")
    await tools.call(query["tool"])
    return {"solver": 1.0}


def score(text: str, answer: str) -> float:
    return float(text == answer)


async def brevity(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    assert query["data"]["question"]
    return {"solver": -0.5 * sum(turn["agent"] == "solver" for turn in turns)}


def explodes() -> None:
    raise RuntimeError("the tool's own bug")


def no_json() -> object:
    return object()


def hangs() -> None:
    time.sleep(3600)
