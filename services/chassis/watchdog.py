"""Watchdog that ends a service's process if it can no longer work and cannot notice it itself.

Two conditions leave a process alive and useless. Its event loop is blocked forever: a thread that
gets no memory for its first frame makes `Thread.start` wait forever. Or the process gets no more
memory (a limit on its address space, a host without overcommit), so that every call fails. The
supervisor of the process restarts it, and its callers repeat their calls meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import mmap
import os
import threading
import time
from typing import Final

PERIOD_SECONDS: Final = 1.0
MEMORY_SECONDS: Final = 10.0
"""Time without memory after which a process ends; another process may need the memory briefly."""
EXIT_STATUS: Final = 70  # EX_SOFTWARE of sysexits.h
# A thread's stack: without it, no blocking call can begin.
_PROBE_BYTES: Final = 8 * 2**20


def start_watchdog(name: str, stall_seconds: float) -> None:
    """Watch this process, and the event loop of the calling thread until the loop is closed.

    A daemon thread checks once a second and ends the process with `EXIT_STATUS`. `stall_seconds`:
    how long the loop may be blocked; 0: without a limit. Only time in which the thread itself runs
    counts, so that a process survives being stopped (SIGSTOP, a suspended host).
    """
    loop = asyncio.get_running_loop()
    # Formatted now: later there may be no memory for it.
    no_memory = (
        f"{name}: the process gets no more memory and ends; raise its limit (ulimit -v, a "
        "container's limit), or reduce its load. Its threads:\n"
    ).encode()
    no_progress = (
        f"{name}: the event loop has been blocked for {stall_seconds:g} s "
        "(TROUPE_STALL_EXIT_SECONDS) and the process ends. Its threads:\n"
    ).encode()

    def watch() -> None:
        advanced = threading.Event()  # set by the loop once it runs the callback
        asked = False
        stalled = starved = 0.0
        woke = time.monotonic()
        while True:
            time.sleep(PERIOD_SECONDS)
            now = time.monotonic()
            passed, woke = min(now - woke, 2 * PERIOD_SECONDS), now
            starved = 0.0 if _has_memory() else starved + passed
            if starved >= MEMORY_SECONDS:
                _end(no_memory)
            if asked and not advanced.is_set():
                stalled += passed
                if 0 < stall_seconds <= stalled:
                    _end(no_progress)
                continue
            stalled, asked = 0.0, False
            advanced.clear()
            with contextlib.suppress(MemoryError):
                try:
                    loop.call_soon_threadsafe(advanced.set)
                except RuntimeError:  # the loop is closed: the process is ending
                    return
                asked = True

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def _end(line: bytes) -> None:
    # Logging would need the memory and the locks that are missing.
    with contextlib.suppress(MemoryError, OSError):
        os.write(2, line)
        faulthandler.dump_traceback(2)
    os._exit(EXIT_STATUS)


def _has_memory() -> bool:
    try:
        mmap.mmap(-1, _PROBE_BYTES).close()
    except (MemoryError, OSError):
        return False
    return True
