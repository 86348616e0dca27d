"""Steps in a window of time, with the CPU seconds of a process and all below it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import psutil


def cpu_seconds() -> float:
    """Of this process and all its descendants."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def report(collect: Callable[[], int], warm_up: float, seconds: float) -> dict[str, float]:
    """Call `collect`, which says how many steps it brought, first unmeasured; print what came."""
    began = time.perf_counter()
    while time.perf_counter() - began < warm_up:
        collect()
    steps, spent, began = 0, cpu_seconds(), time.perf_counter()
    while (wall := time.perf_counter() - began) < seconds:
        steps += collect()
    found = {"steps": float(steps), "wall": wall, "cpu": cpu_seconds() - spent}
    print(json.dumps(found), flush=True)
    return found
