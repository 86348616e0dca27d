"""Time and memory of a process, the same way on both sides."""

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
    """Bytes of this process in memory now, or the most there were (`VmHWM`)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")


class Meter:
    """Seconds of every step, and what memory rose to above `before`."""

    def __init__(self, before: int, clock: Callable[[], float] = time.process_time) -> None:
        """`before`: bytes resident before there was a model; `clock`: seconds."""
        self._before, self._clock = before, clock
        self._seconds: list[float] = []
        self._began = 0.0
        _CLEAR.write_text("5")  # what was the most so far is no more

    def begin(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def end(self) -> None:
        """It is over."""
        self._seconds.append(self._clock() - self._began)

    def report(self, **more: Any) -> None:
        """Print one line of JSON; the first step was for warming up."""
        peak = resident("VmHWM") - self._before
        seconds = statistics.median(self._seconds[1:])
        print(json.dumps({"seconds": seconds, "peak_bytes": peak, **more}), flush=True)


def clock_of(threads: int) -> Callable[[], float]:
    """With one thread its CPU seconds: what else runs on the machine does not count."""
    return time.process_time if threads == 1 else time.perf_counter
