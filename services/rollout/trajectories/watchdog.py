"""Gets the event loop back from a workflow that blocks it.

Workflows are the users' code, and one that computes or sleeps without awaiting stops everything
else in the process: other trajectories, heartbeats, the deadline that would end it. A thread
notices that the loop stands still inside a workflow and interrupts it there, by a signal whose
handler raises; that trajectory fails and says where it was.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import traceback
from collections import deque
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final

import structlog

from troupe.outcomes import Interruption

log = structlog.get_logger(__name__)

# A module that is being imported must not be torn apart for a second or two.
_IMPORT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.25
_SIGNAL: Final = signal.SIGUSR1

IN_WORKFLOW: ContextVar[str] = ContextVar("in_workflow", default="")
"""Id of the trajectory whose workflow the current task runs; its branches inherit it."""


# Ends of the newest blockages (monotonic clock), their seconds, and whose they were.
_BLOCKAGES: deque[tuple[float, float, str]] = deque(maxlen=100)


def blocked_since(start: float) -> tuple[float, str]:
    """Seconds for which workflows held the event loop since `start` (monotonic clock), and the id
    of the last such trajectory: those that share the loop with it miss their deadlines."""
    found = [(seconds, who) for end, seconds, who in _BLOCKAGES if end > start]
    return sum(seconds for seconds, _ in found), found[-1][1] if found else ""


def blocked_note(start: float) -> str:
    """The same as the end of a message about a missed deadline; empty: nobody held it."""
    seconds, culprit = blocked_since(start)
    if not seconds:
        return ""
    return f"; for {seconds:.1f} s of it the workflow of {culprit} blocked the event loop"


class WorkflowBlockedError(Interruption):
    """Raised inside a blocking workflow. Not an `Exception`: a loop with `except Exception` would
    go on."""


class Watchdog:
    """Watches the event loop that it is started in, if that runs in the main thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ticks = 0
        self._tick: asyncio.TimerHandle | None = None
        self._done = threading.Event()
        self._former: Any = None
        self._active = False
        # How long the loop has stood still when the signal is sent.
        self._stood = 0.0

    def start(self) -> None:
        """Begin to watch. Without effect outside of the main thread, where signals cannot help."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._active = True
        self._former = signal.signal(_SIGNAL, self._interrupt)
        self._beat(asyncio.get_running_loop())
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """End. Repeatable."""
        if self._active:
            self._active = False
            self._done.set()
            # The thread may be about to send its last signal, whose default action is to kill.
            default = self._former in (None, signal.SIG_DFL)
            signal.signal(_SIGNAL, signal.SIG_IGN if default else self._former)
        if self._tick is not None:
            self._tick.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks += 1
        self._tick = loop.call_later(_LOOK_SECONDS, self._beat, loop)

    def _look(self) -> None:
        seen, stood = -1, 0.0
        while not self._done.wait(_LOOK_SECONDS):
            # Looks are counted, not seconds: a process that was stopped has lost no time.
            stood = stood + _LOOK_SECONDS if self._ticks == seen else 0.0
            seen = self._ticks
            if stood >= self._seconds:
                self._stood = stood
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, in the middle of whatever holds it up."""
        trajectory_id = IN_WORKFLOW.get()
        stack = traceback.extract_stack(frame)
        where = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "?"
        importing = any("importlib._bootstrap" in entry.filename for entry in stack)
        if not trajectory_id or (importing and self._stood < _IMPORT_SECONDS):
            log.warning("the event loop stands still", seconds=self._stood, where=where)
            return
        log.error(
            "a workflow blocks the event loop",
            trajectory_id=trajectory_id,
            seconds=self._stood,
            where=where,
        )
        _BLOCKAGES.append((time.monotonic(), self._stood, trajectory_id))
        raise WorkflowBlockedError(f"held the event loop for {self._stood:.1f} s at {where}")
