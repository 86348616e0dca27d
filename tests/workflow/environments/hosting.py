"""Shared parts of tests of environments in separate processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.waiting import until
from troupe.workflow.environments import COUNTERS, FaultLimits, Hosted, hosted

ZOO = "tests.workflow.environments.zoo"
QUICK = FaultLimits(retries=2, backoff_seconds=0.01, max_backoff_seconds=0.02, wait_seconds=60)


def naughty(what: str, when: str, limits: FaultLimits = QUICK, **args: Any) -> Hosted:
    return hosted(f"{ZOO}:Naughty", {"what": what, "when": when, **args}, limits=limits)


def counts() -> dict[str, int]:
    return {event: COUNTERS.of(event) for event in ("resets", "retries", "faults", "kills")}  # type: ignore[arg-type]


def gained(before: dict[str, int]) -> dict[str, int]:
    return {event: now - before[event] for event, now in counts().items() if now != before[event]}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def environ_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def until_gone(pid: int) -> None:
    await until(lambda: gone(pid))
