"""A child of the embedded cluster must not outlive it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

_PERIOD_SECONDS = 0.5
# After this long the orderly stop has failed: nobody is left who would end this process.
_GIVE_UP_SECONDS = 30.0


def watch_parent(pid: int, gone: Callable[[], None]) -> None:
    """Call `gone()` from a thread once the process `pid` has ended."""
    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        gone()
        return
    threading.Thread(target=_watch, args=(parent, gone), name="parent-watch", daemon=True).start()


def _watch(parent: psutil.Process, gone: Callable[[], None]) -> None:
    # A zombie parent still "runs"; its children have been given to another one by then.
    direct = os.getppid() == parent.pid
    while parent.is_running() and (not direct or os.getppid() == parent.pid):
        time.sleep(_PERIOD_SECONDS)
    gone()
    time.sleep(_GIVE_UP_SECONDS)
    os._exit(1)
