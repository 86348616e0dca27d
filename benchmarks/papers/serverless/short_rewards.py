"""Short rewards for `benchmarks.papers.serverless`."""

from __future__ import annotations

import time


def nothing(x: int = 0) -> int:
    """Return at once, so that a call takes only its overhead."""
    return x


def waits(seconds: float) -> float:
    """Wait without using a core, like a function that calls another service, so that a machine with
    few cores can run as many calls at once as there are workers."""
    time.sleep(seconds)
    return 1.0
