"""Time and memory of a process, measured in the same way on both sides."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes of this process, or their peak (`VmHWM`)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")


class Meter:
    """A meter of every step's seconds, and of the peak memory above `before`."""

    def __init__(self, before: int, clock: Callable[[], float] = time.process_time) -> None:
        """`before`: resident bytes before the model existed; `clock`: seconds."""
        self._before, self._clock = before, clock
        self._seconds: list[float] = []
        self._began = 0.0
        _CLEAR.write_text("5")  # resets the peak

    def begin(self) -> None:
        """Begin a step."""
        self._began = self._clock()

    def end(self) -> None:
        """End the step."""
        self._seconds.append(self._clock() - self._began)

    def report(self, **more: Any) -> None:
        """Print one line of JSON, without the first step, which is warm-up."""
        peak = resident("VmHWM") - self._before
        seconds = statistics.median(self._seconds[1:])
        print(json.dumps({"seconds": seconds, "peak_bytes": peak, **more}), flush=True)


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock: CPU seconds with one thread, so that other programs do not count."""
    return time.process_time if threads == 1 else time.perf_counter
