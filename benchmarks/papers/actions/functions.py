"""Functions for the reward service: work as parallel as its cores, burnt or slept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

# Directory in which a paced service writes each worker's number of cores.
PACED_DIR: Final = "TROUPE_PACED_CORES_DIR"


def burnt(serial: float, parallel: float) -> float:
    """Use `serial` seconds of CPU, then `parallel` ones split over a process per core, like a test
    runner; return the elapsed seconds."""
    began = time.perf_counter()
    cores = len(os.sched_getaffinity(0)) if parallel else 1
    _burn(serial)
    children = [_child(parallel / cores) for _ in range(cores - 1)]
    _burn(parallel / cores)
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - began


def paced(serial: float, parallel: float) -> float:
    """Sleep as long as this takes with the assigned cores; return the time."""
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
