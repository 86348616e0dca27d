"""Workflows, tools and rewards as careless users write them.

They play with the agents, tasks and models of `tests.support.tiny_team`. What happens "at times"
happens with the queries about the letter a: one in four of a step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from tests.support.tiny_team import share_of_a

Query = Mapping[str, Any]
# Steps whose queries have an index below it are the first, with four queries per step.
FIRST_STEP = 4


def _unlucky(query: Query) -> bool:
    return str(query["question"]).startswith("a")


async def quick(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """One turn each: the least that trains both policies."""
    draft, critique = await asyncio.gather(
        agents["solver"].chat(query["question"]), agents["checker"].chat(query["question"])
    )
    return {"solver": share_of_a(draft.text), "checker": share_of_a(critique.text)}


async def chatty(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """Enough turns that an observer who looks twice a second sees it at work."""
    for _ in range(9):
        await quick(query, agents, tools)
    return await quick(query, agents, tools)


async def unrewarded(query: Query, agents: Any, tools: Any) -> None:
    """Leaves the rewards to reward functions."""
    await quick(query, agents, tools)


async def raises(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """A bug that every query meets."""
    await agents["solver"].chat(query["question"])
    raise RuntimeError("the user's bug")


async def stops_at_a_breakpoint(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """A breakpoint that its author forgot."""
    reply = await agents["solver"].chat(query["question"])
    breakpoint()
    return {"solver": share_of_a(reply.text), "checker": 0.0}


async def prints(query: Query, agents: Any, tools: Any) -> None:
    """Looks at a query."""
    print("the workflow sees", query["question"])
    await quick(query, agents, tools)


async def raises_at_times(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """A bug that some queries meet."""
    if _unlucky(query):
        raise KeyError("answer")
    return await quick(query, agents, tools)


async def hangs(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """Waits for what never comes."""
    await agents["solver"].chat(query["question"])
    await asyncio.Event().wait()
    return {}


async def hangs_at_times(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """Some queries wait for what never comes."""
    if _unlucky(query):
        await asyncio.Event().wait()
    return await quick(query, agents, tools)


async def shouts_at_times(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """An argument larger than any message between services may be."""
    if _unlucky(query):
        await tools.call("score", text="a" * (70 << 20))
    return await quick(query, agents, tools)


async def talks_too_long_at_times(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """A prompt that no engine has room for."""
    if _unlucky(query):
        await agents["solver"].chat("a" * 5000)
    return await quick(query, agents, tools)


async def kills_its_worker(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """Some queries take the rollout worker with them, whenever they are played."""
    if _unlucky(query):
        os._exit(3)
    return await quick(query, agents, tools)


async def misspells_an_agent(query: Query, agents: Any, tools: Any) -> dict[str, float]:
    """Asks an agent that the job does not have."""
    await agents["slover"].chat(query["question"])
    return {}


async def returns_text(query: Query, agents: Any, tools: Any) -> str:
    """Discard a workflow's result."""
    await quick(query, agents, tools)
    return "good"


async def enormous_at_first(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """In the first step finite rewards without a finite gradient."""
    draft, critique = await asyncio.gather(
        agents["solver"].chat(query["question"]), agents["checker"].chat(query["question"])
    )
    scale = 1e300 if query.index < FIRST_STEP else 0.01
    return {"solver": scale * sum(draft.token_ids), "checker": share_of_a(critique.text)}


def reward_raises(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """Divides by zero at times."""
    return {"solver": 1 / "abcdef".index(query["data"]["question"][0]), "checker": 0.0}


def reward_hangs(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """Takes forever at times."""
    if _unlucky(query["data"]):
        time.sleep(3600)
    return {"solver": float(len(turns[0]["response"])), "checker": 0.0}


def reward_is_nan(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """Gives NaN at times."""
    value = float("nan") if _unlucky(query["data"]) else float(len(turns[0]["response"]))
    return {"solver": value, "checker": 0.0}


def reward_stops(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """A breakpoint that its author forgot."""
    breakpoint()
    return {"solver": 1.0, "checker": 0.0}


def reward_prints(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """Looks at a reply."""
    print("the reward sees", len(turns[0]["response"]), "characters")
    return {"solver": share_of_a(turns[0]["response"]), "checker": 0.0}


def always_nan(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    """NaN, whatever happened."""
    return {"solver": float("nan"), "checker": 0.0}


class NoTasks:
    """Tasks without a single one."""

    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(index)
