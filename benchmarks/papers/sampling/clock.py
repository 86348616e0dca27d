"""Steps in windows of time, with the CPU seconds of a process and its descendants."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import psutil

_BEGIN_SECONDS = 1.0


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants."""
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
    """Measure a window per line of stdin, "SECONDS WORKERS", until its end.

    `collect(workers)` returns the number of steps that reached this process. A fifth of a window
    passes unmeasured first, to empty buffers. Prints a line per window, and one when all workers
    run.
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
