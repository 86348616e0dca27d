"""Rewards as short as most are, for `benchmarks.papers.serverless`."""

from __future__ import annotations

import time


def nothing(x: int = 0) -> int:
    """Answers at once: what a call takes is what it costs to make one."""
    return x


def waits(seconds: float) -> float:
    """Takes its time and no core, as one does that asks somebody else; so a machine of few cores
    can run as many at once as there are workers."""
    time.sleep(seconds)
    return 1.0
