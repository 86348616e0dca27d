"""All that a process has started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil


def descendants(pid: int) -> list[int]:
    """Ids of the processes below `pid`; empty when it is gone.

    The kernel's own lists, where it keeps them: psutil looks through all processes of the machine.
    """
    found: list[int] = []
    ahead = [pid]
    while ahead:
        try:
            below = _children(ahead.pop())
        except FileNotFoundError:
            return _slowly(pid)
        found += below
        ahead += below
    return found


def family(pid: int) -> list[int]:
    """`pid` and its `descendants`; empty when it is gone."""
    below = descendants(pid)
    return [pid, *below] if psutil.pid_exists(pid) else []


def kill_with_children(pid: int) -> None:
    """Kill a process, its group and its children: a sandbox's first process, with which all in it
    end, is of another user and another session than what waits for it outside."""
    try:
        below = _children(pid)
    except FileNotFoundError:
        below = _slowly(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Raises FileNotFoundError where the kernel keeps no lists."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return found  # it has ended
    for task in tasks:
        try:
            found += map(int, (task / "children").read_text().split())
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            if task.exists():
                raise
    return found


def _slowly(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
