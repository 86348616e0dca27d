"""What the reward service runs here: work that is as parallel as it has cores, burnt or slept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

# Where a paced service writes how many of its cores each worker has.
PACED_DIR: Final = "TROUPE_PACED_CORES_DIR"


def burnt(serial: float, parallel: float) -> float:
    """`serial` seconds of CPU, then `parallel` ones split over a process per core, as a test
    runner does; returns the seconds that it took."""
    began = time.perf_counter()
    cores = len(os.sched_getaffinity(0)) if parallel else 1
    _burn(serial)
    children = [_child(parallel / cores) for _ in range(cores - 1)]
    _burn(parallel / cores)
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - began


def paced(serial: float, parallel: float) -> float:
    """As long as that takes with the cores that it was given, asleep; returns that time."""
    began = time.perf_counter()
    path = Path(os.environ[PACED_DIR], str(os.getpid()))
    time.sleep(serial + parallel / max(1, int(path.read_text() or 1)))
    return time.perf_counter() - began


def _child(seconds: float) -> int:
    pid = os.fork()
    if not pid:
        _burn(seconds)
        os._exit(0)
    return pid


def _burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
