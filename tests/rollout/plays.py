"""Workflows, tasks and functions that the tests' jobs name."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from troupe.workflow import branch

LARGE = np.arange(100_000, dtype=np.float32)
"""A column that no row has room for."""

RELEASED: asyncio.Event | None = None
"""Set by a test that lets `waits` go on."""


def go_on() -> None:
    """Let `waits` continue."""
    assert RELEASED is not None
    RELEASED.set()


class Numbers:
    """A task set: {"question": "3+4", "answer": "7"}."""

    def __init__(self, split: str, size: int = 10, broken: bool = False) -> None:
        self._offset = 0 if split == "train" else 100
        self._size = size
        self._broken = broken

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._broken:
            raise OSError("the disk is gone")
        a = index + self._offset
        return {"question": f"{a}+4", "answer": str(a + 4)}


def make_tasks(split: str, **args: Any) -> Numbers:
    return Numbers(split, **args)


async def team(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Solver, checker, solver again: three turns by two policies."""
    draft = await agents["solver"].chat(query["question"])
    advice = await agents["checker"].chat(f"{query['question']}={draft.text}?")
    final = await agents["solver"].chat(
        [_user(query["question"]), draft, _user(advice.text or "?")]
    )
    query.log(length=len(final.text))
    return {"solver": float(len(final.text)), "checker": 1.0, "team": 0.5}


async def branches(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    drafts = await asyncio.gather(*(agents["solver"].chat(query["question"]) for _ in range(4)))
    for number, draft in enumerate(drafts):
        draft.reward = number
    return {"checker": 0.0}


async def tree(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Two parallel lines of different length; each begins with a tree of its own size."""

    async def line(number: int) -> None:
        draft = await branch(
            agents["solver"],
            f"{query['question']}, line {number}",
            n=2 + number,
            score=lambda reply: len(reply.text) + reply.siblings.index(reply),
        )
        for _ in range(number):
            (await agents["checker"].chat(draft.text or "?")).reward = 1.0

    await asyncio.gather(line(0), line(1))
    return {}


async def parallel(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Six independent turns, requested in three ways."""

    async def line() -> None:
        await agents["checker"].chat(query["question"])

    async with asyncio.TaskGroup() as group:
        group.create_task(line())
        group.create_task(agents["solver"].chat(query["question"], n=3))
        await asyncio.gather(*(agents["solver"].generate([5, 6, n]) for n in range(2)))
    return {"solver": 1.0, "checker": 1.0}


async def one_turn(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    return {"solver": len(reply.text)}


async def scored_elsewhere(query: Any, agents: Any, tools: Any) -> None:
    await agents["solver"].chat(query["question"])


async def uses_tool(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    return {"solver": await tools.call("add", a=query.index, b=1)}


async def uses_what_it_left(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    await tools.call("counts")
    return {"solver": await tools.call("counts")}


async def raises(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    raise ValueError("no such luck")


async def stops(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    breakpoint()
    return {"solver": 1.0}


async def exits_in_a_branch(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await asyncio.gather(exits(query, agents, tools), agents["solver"].chat("?"))
    return {}


async def exits(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    raise SystemExit(3)


async def never_returns(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    await asyncio.Event().wait()
    return {}


async def refuses_to_end(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def waits_in_a_thread(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await asyncio.to_thread(time.sleep, 3600)
    return {}


async def cancels_itself(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    raise asyncio.CancelledError


async def blocks(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    if query.index == 0:
        time.sleep(3600)  # noqa: ASYNC251 - the fault under test
    reply = await agents["solver"].chat(query["question"])
    return {"solver": len(reply.text)}


async def spins(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    while query.index == 0:
        pass
    reply = await agents["solver"].chat(query["question"])
    return {"solver": len(reply.text)}


async def waits(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    assert RELEASED is not None
    await RELEASED.wait()
    reply = await agents["solver"].chat(query["question"])
    return {"solver": len(reply.text)}


async def long_winded(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"], max_new_tokens=200)
    return {"solver": 0.0}


async def returns_nan(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    return {"solver": math.nan}


async def returns_list(query: Any, agents: Any, tools: Any) -> list[float]:
    return [1.0]


async def rewards_stranger(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    return {"sovler": 1.0}


async def rewards_nobody(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    return {}


async def writes_text_as_a_metric(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    query.metrics["length"] = reply.text
    return {"solver": 1.0}


async def replaces_the_metrics(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    query.metrics = None
    return {"solver": 1.0}


async def edits_its_replies(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    first = await agents["solver"].chat(query["question"])
    second = await agents["solver"].chat("again")
    first.text, second.text, second.finish_reason = "half \ud800", None, 5
    return {"solver": 1.0}


async def judged(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """The solver answers, the checker repeats the answer of every query, and rejects it on odd
    ones."""
    draft = await agents["solver"].chat(query["question"])
    draft.text = f"We add the numbers one after another. #{query['answer']}"
    verdict = await agents["checker"].chat(query["question"] + draft.text)
    # As an agent that is left out says nothing.
    if verdict.response:
        wrong = query.index % 2
        verdict.text = "No #0" if wrong else draft.text
    return {"team": float(bool(verdict.text))}


async def asks_stranger(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["critic"].chat(query["question"])
    return {}


async def talks_too_long(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat("x" * 1000)
    return {}


async def leaves_branches(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    query.data["left"] = asyncio.create_task(_endless(agents["solver"]))
    await asyncio.sleep(0.05)
    return {"solver": len(reply.text)}


async def _endless(agent: Any) -> None:
    while True:
        await agent.chat("more", max_new_tokens=200)


async def annotates(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    reply.columns["note"] = {"index": query.index}
    reply.columns["small"] = np.array([1, 2, 3], np.int32)
    reply.columns["large"] = LARGE
    return {"solver": 1.0}


async def annotates_late(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    assert RELEASED is not None
    await RELEASED.wait()
    return await annotates(query, agents, tools)


async def annotates_badly(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    reply.columns["wave"] = np.zeros(3, np.complex64)
    return {"solver": 1.0}


# Functions of the reward service.


def add(a: int, b: int) -> int:
    return a + b


def counts() -> int:
    """How often it was called where its files are."""
    calls = Path("calls")
    count = 1 + (len(calls.read_text()) if calls.exists() else 0)
    calls.write_text("x" * count)
    return count


def answer_length(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    return {"solver": float(len(turns[-1]["response"])) + query["index"], "checker": 2.0}


def one_for_all(query: Any, turns: Any, rewards: Any) -> float:
    return 10.0


def explodes(query: Any, turns: Any, rewards: Any) -> float:
    raise RuntimeError("scorer out of order")


def hangs(query: Any, turns: Any, rewards: Any) -> float:
    time.sleep(3600)
    return 0.0


def not_a_number(query: Any, turns: Any, rewards: Any) -> float:
    return math.nan


def dies(query: Any, turns: Any, rewards: Any) -> float:
    os._exit(1)


def takes_its_time(query: Any, turns: Any, rewards: Any) -> float:
    """Leaves the process ids of its worker and service where a test looks for them."""
    traces = Path(os.environ["TROUPE_TEST_TRACES"])
    (traces / f"{time.monotonic_ns()}").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(0.5)
    return 10.0


def unknown_agent(query: Any, turns: Any, rewards: Any) -> dict[str, float]:
    return {"nobody": 1.0}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


RESETS: list[str] = []
"""Queries of which `resets` has begun a trajectory."""


async def resets(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Has something to do before its first turn; of the query 1 it fails at that."""
    RESETS.append(query.id)
    await asyncio.sleep(0.01)
    if query.index == 1:
        raise RuntimeError("no environment")
    reply = await agents["solver"].chat(query["question"])
    return {"solver": len(reply.text)}


async def forgets_to_await(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    reply = await agents["solver"].chat(query["question"])
    agents["solver"].chat("and then?")  # never awaited
    _running.add(asyncio.create_task(agents["checker"].chat(reply.text)))
    return {"solver": 1.0, "checker": 1.0}


async def awaits_in_the_end(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """A call that is cancelled, and one that fails, are over."""
    late = asyncio.create_task(agents["solver"].chat(query["question"]))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await agents["checker"].chat(query["question"], n=2)
    return {"solver": 1.0, "checker": 1.0}


_running: set[Any] = set()
