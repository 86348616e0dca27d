"""Workflows whose environments fail and hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import defaultdict
from typing import Any

from services.rollout.trajectories.watchdog import IN_WORKFLOW
from troupe.workflow.errors import EnvironmentFault

# By trajectory: the messages of each attempt.
SAID: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
STUCK: list[int] = []
CHILDREN: list[int] = []
_DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"


def reset() -> None:
    SAID.clear()
    STUCK.clear()
    CHILDREN.clear()


async def fails_twice(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """The environment dies in the middle of the first two attempts."""
    name = IN_WORKFLOW.get()
    reply = await agents["solver"].chat(query["question"])
    SAID[name].append(tuple(reply.token_ids))
    if len(SAID[name]) < 3:
        raise EnvironmentFault("its process is gone", reason="died")
    return {"solver": 1.0}


async def says_and_fails(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    raise EnvironmentFault("its process is gone", reason="died")


async def some_get_stuck(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    await agents["solver"].chat(query["question"])
    if query.index == 0:
        STUCK.append(query.index)
        await asyncio.to_thread(threading.Event().wait, 3600)
    elif query.index == 1:
        await _in_a_child()
    return {"solver": 1.0}


async def _in_a_child() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DEAF, stdin=subprocess.DEVNULL
    )
    CHILDREN.append(process.pid)
    STUCK.append(1)
    try:
        await process.wait()
    finally:
        process.kill()
