"""Parts of the GPU benchmarks: processes with deadlines; a failing one never stops the next one.

A part is a module that prints JSON objects; the last one counts: one that is ended early has
said what it knew. One with `problems` (by name) failed although it has figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

import psutil
from rich.console import Console

from benchmarks.command import scratch

_ROOT: Final = Path(__file__).resolve().parents[2]
# How long a part at its deadline may take to end what it started, before all of it is killed.
_END_SECONDS: Final = 10.0
# A killed process may wait for a device until it is gone.
_KILLED_SECONDS: Final = 30.0
# A part that prints nothing is reported to run still, this often.
_REMINDER_SECONDS: Final = 60.0
_TAIL_LINES: Final = 5


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """A module to run, and what it is for."""

    arguments: tuple[str, ...]
    """The module and its arguments."""
    seconds: float
    """Expected duration on one H100, with its starts of servers and compilations."""
    proves: str
    shown: tuple[str, ...] = ()
    """Figures for the table."""
    reason_to_skip: Callable[[str], str] = lambda device: ""
    """Says why a machine with such a device ("cuda", "cpu") cannot try it; "" if it can."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    name: str
    status: Status
    seconds: float = 0.0
    limit_seconds: float = 0.0
    reason: str = ""
    """Why it failed or was skipped."""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for programs, with rounded seconds."""
        return {
            "part": self.name,
            "status": self.status.value,
            "seconds": round(self.seconds, 1),
            "limit_seconds": round(self.limit_seconds, 1),
            **({"reason": self.reason} if self.reason else {}),
            "figures": self.figures,
        }


def limit_of(part: Part, later: Iterable[Part], left: float) -> float | None:
    """Return the seconds that `part` may take when `left` remain for it and `later` parts.

    That is twice what it is expected to take, or its share of what is left if that is more, so that
    a part that hangs leaves time for the others. None: too little is left to begin.
    """
    if left < part.seconds / 2:
        return None
    expected = part.seconds + sum(one.seconds for one in later)
    return min(left, max(2 * part.seconds, left * part.seconds / expected))


def run_all(
    parts: Mapping[str, Part],
    seconds: float,
    console: Console,
    device: str = "cpu",
    options: Iterable[str] = (),
) -> Iterator[Outcome]:
    """Run all parts on `device` within `seconds` in total; yield the outcome of each as it ends.

    `options`: further arguments of every part. `console`: for the progress of the parts.
    """
    ends_at = time.monotonic() + seconds
    reasons = {name: part.reason_to_skip(device) for name, part in parts.items()}
    later = {name: part for name, part in parts.items() if not reasons[name]}
    for name, part in parts.items():
        later.pop(name, None)
        if reasons[name]:
            yield Outcome(name, Status.SKIPPED, reason=reasons[name])
            continue
        left = ends_at - time.monotonic()
        limit = limit_of(part, later.values(), left)
        if limit is None:
            reason = f"{max(0, left):.0f} s are left; it takes about {part.seconds:.0f}"
            yield Outcome(name, Status.SKIPPED, reason=reason)
            continue
        console.print(f"{name}: {part.proves} ({limit:.0f} s at most)", highlight=False)
        yield run(name, [*part.arguments, *options], limit, console)


def run(name: str, arguments: list[str], seconds: float, console: Console) -> Outcome:
    """Run a module for at most `seconds`; what it prints to stderr is passed on to `console`.

    At the deadline, and however else it ends, all processes that it has started end with it.
    """
    began = time.monotonic()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with scratch() as place:
        out = place / "out"
        with out.open("w") as target:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", *arguments],
                stdout=target,
                stderr=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        tree = _Tree(process)
        try:
            assert process.stderr is not None
            follower = threading.Thread(
                target=_follow, args=(process.stderr, tail, console), daemon=True
            )
            follower.start()
            status = _wait(process, seconds, console, tree.look)
        finally:
            tree.end()
        follower.join(_END_SECONDS)
        found = _last_object(out)
    taken = time.monotonic() - began
    problems: dict[str, str] = (found or {}).pop("problems", {})
    if status is None:
        reason = " | ".join((f"took over {seconds:.0f} s", *tail))
    elif status:
        reason = " | ".join(tail) or f"exit status {status}"
    elif found is None:
        reason = "it printed no JSON object"
    else:
        reason = "; ".join(f"{what}: {why}" for what, why in problems.items())
    if reason:
        return Outcome(name, Status.FAILED, taken, seconds, reason, found or {})
    return Outcome(name, Status.PASSED, taken, seconds, figures=found or {})


class _Tree:
    """A process and everything that it starts, also in other sessions and after it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Note the processes that are there now: those whose parent ends have another one then."""
        with contextlib.suppress(psutil.Error):
            self._seen |= set(psutil.Process(self._process.pid).children(recursive=True))
        for one in list(self._seen):
            with contextlib.suppress(psutil.Error):
                self._seen |= set(one.children(recursive=True))

    def end(self) -> None:
        """Ask the process to end, and kill what is left."""
        self.look()
        if self._process.poll() is None:
            # Only the part itself: it ends its own children in their order.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self.look()
            self._process.kill()
        for one in self._seen:
            with contextlib.suppress(psutil.Error):
                one.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILLED_SECONDS)
        psutil.wait_procs(self._seen, _KILLED_SECONDS)


def _follow(stream: IO[str], tail: deque[str], console: Console) -> None:
    for line in stream:
        if text := line.rstrip():
            tail.append(text)
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


def _wait(
    process: subprocess.Popen[str], seconds: float, console: Console, look: Callable[[], None]
) -> int | None:
    """Return its exit status; None if it still runs after `seconds`."""
    began = told = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(1.0, seconds - passed))
        look()
        if time.monotonic() - told >= _REMINDER_SECONDS:
            told = time.monotonic()
            console.print(f"  runs for {told - began:.0f} s of at most {seconds:.0f}")
    return None


def _last_object(printed: Path) -> dict[str, Any] | None:
    for line in reversed(printed.read_text(errors="replace").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None
