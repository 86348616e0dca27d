"""Steps in windows of time, with the CPU seconds of a process and all below it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import psutil

_BEGIN_SECONDS = 1.0


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


def serve(collect: Callable[[int], int]) -> None:
    """Measure a window per line of stdin, "SECONDS WORKERS", until there are no more.

    `collect(workers)` says how many steps came back to this process. A fifth of a window goes by
    unmeasured first, in which what waits in buffers is taken. Prints a line per window, and one
    when all run.
    """
    began = time.perf_counter()
    while time.perf_counter() - began < _BEGIN_SECONDS:
        collect(0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        seconds, workers = float(line.split()[0]), int(line.split()[1])
        began = time.perf_counter()
        while time.perf_counter() - began < seconds / 5:
            collect(workers)
        steps, spent, began = 0, cpu_seconds(), time.perf_counter()
        while (wall := time.perf_counter() - began) < seconds:
            steps += collect(workers)
        found = {"steps": float(steps), "wall": wall, "cpu": cpu_seconds() - spent}
        print(json.dumps(found), flush=True)
