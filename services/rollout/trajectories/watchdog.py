"""Interruption of workflows that block the event loop.

Workflows are user code. One that computes or sleeps without awaiting stops everything else in the
process: other trajectories, heartbeats, even the deadline that would end it. A thread notices that
the loop does not advance inside a workflow and sends a signal whose handler raises there; that
trajectory fails and reports where it was.
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

# Imports may block this long: interrupting one leaves a half-imported module.
_IMPORT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.25
_SIGNAL: Final = signal.SIGUSR1

IN_WORKFLOW: ContextVar[str] = ContextVar("in_workflow", default="")
"""Id of the trajectory whose workflow the current task runs; inherited by its branches."""


# Newest blockages: end (monotonic clock), seconds, trajectory id.
_BLOCKAGES: deque[tuple[float, float, str]] = deque(maxlen=100)


def blocked_since(start: float) -> tuple[float, str]:
    """Return seconds for which workflows blocked the event loop since `start` (monotonic clock),
    and the id of the last such trajectory. Others that share the loop miss their deadlines
    meanwhile."""
    found = [(seconds, who) for end, seconds, who in _BLOCKAGES if end > start]
    return sum(seconds for seconds, _ in found), found[-1][1] if found else ""


def blocked_note(start: float) -> str:
    """Return the end of an error message about a missed deadline that names the blocking workflow;
    empty if none blocked the loop."""
    seconds, culprit = blocked_since(start)
    if not seconds:
        return ""
    return f"; for {seconds:.1f} s of it the workflow of {culprit} blocked the event loop"


class WorkflowBlockedError(Interruption):
    """Raised inside a blocking workflow. No `Exception`: `except Exception` must not catch it."""


class Watchdog:
    """A watch on the event loop in which it is started, if the loop runs in the main thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ticks = 0
        self._tick: asyncio.TimerHandle | None = None
        self._done = threading.Event()
        self._former: Any = None
        self._active = False
        # How long the loop has been blocked when the signal is sent.
        self._blocked_seconds = 0.0

    def start(self) -> None:
        """Start watching, if this is the main thread: signals can interrupt no other thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._active = True
        self._former = signal.signal(_SIGNAL, self._on_signal)
        self._beat(asyncio.get_running_loop())
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Repeatable."""
        if self._active:
            self._active = False
            self._done.set()
            # The thread may yet send its last signal, whose default action kills the process.
            default = self._former in (None, signal.SIG_DFL)
            signal.signal(_SIGNAL, signal.SIG_IGN if default else self._former)
        if self._tick is not None:
            self._tick.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks += 1
        self._tick = loop.call_later(_LOOK_SECONDS, self._beat, loop)

    def _run(self) -> None:
        seen, blocked = -1, 0.0
        while not self._done.wait(_LOOK_SECONDS):
            # Intervals are counted, not seconds: a suspended process has blocked nothing.
            blocked = blocked + _LOOK_SECONDS if self._ticks == seen else 0.0
            seen = self._ticks
            if blocked >= self._seconds:
                self._blocked_seconds = blocked
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: raise in the main thread, wherever it is blocked."""
        trajectory_id = IN_WORKFLOW.get()
        stack = traceback.extract_stack(frame)
        where = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "?"
        importing = any("importlib._bootstrap" in entry.filename for entry in stack)
        if not trajectory_id or (importing and self._blocked_seconds < _IMPORT_SECONDS):
            log.warning("the event loop is blocked", seconds=self._blocked_seconds, where=where)
            return
        log.error(
            "a workflow blocks the event loop",
            trajectory_id=trajectory_id,
            seconds=self._blocked_seconds,
            where=where,
        )
        _BLOCKAGES.append((time.monotonic(), self._blocked_seconds, trajectory_id))
        raise WorkflowBlockedError(
            f"held the event loop for {self._blocked_seconds:.1f} s at {where}"
        )
