"""The ending of processes, in order or by force: one process, its group, or all its descendants.

Functions in sandboxes import this module through Troupe's tools, so slow imports are local.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio

# How long a killed process may take to end: it may be waiting for a disk or a device.
_KILLED_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02


class AsyncProcess(Protocol):
    """A process that an event loop waits for: asyncio's, or one from a fork server."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""

    async def wait(self) -> int:
        """Wait for the end; return the exit status."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


def stop_process(process: subprocess.Popen[Any], seconds: float, *, group: bool = False) -> int:
    """Stop a process: SIGTERM, and SIGKILL if it still runs after `seconds`. Repeatable.

    With `group`, the process leads a process group: the whole group is signalled, and its remaining
    processes are killed. Returns the exit status, negative for a signal. Raises
    `subprocess.TimeoutExpired` for a process that does not end even when killed.
    """
    if group:
        signal_group(process.pid, signal.SIGTERM)
    else:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    if group:
        signal_group(process.pid, signal.SIGKILL)
    return process.wait(_KILLED_SECONDS)


async def stop_process_async(process: AsyncProcess, seconds: float, *, group: bool = False) -> int:
    """Stop a process of an event loop as `stop_process` does. Raises TimeoutError if it does not
    end even when killed."""
    import asyncio

    with contextlib.suppress(ProcessLookupError):
        if group:
            signal_group(process.pid, signal.SIGTERM)
        else:
            process.terminate()
    try:
        async with asyncio.timeout(seconds):
            # `wait` of asyncio also waits for pipes, which children that the process leaves hold.
            if not group:
                await process.wait()
            while process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if group:
        signal_group(process.pid, signal.SIGKILL)
    async with asyncio.timeout(_KILLED_SECONDS):
        return await process.wait()


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the process group that `pid` leads or led, if it still exists.

    Processes of other users in the group are not signalled.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group and all its descendants, in any session."""
    below = descendants(pid)
    signal_group(pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes below `pid`; none when it has ended.

    They come from the kernel's lists if available, because psutil looks at all processes of the
    machine.
    """
    found: list[int] = []
    ahead = [pid]
    while ahead:
        try:
            below = _children(ahead.pop())
        except FileNotFoundError:
            return _search(pid)
        found += below
        ahead += below
    return found


def _children(pid: int) -> list[int]:
    """Return the ids of the children of `pid`. Raises FileNotFoundError if the kernel keeps no
    lists."""
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


def _search(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def close_output(process: asyncio.subprocess.Process) -> None:
    """Close this end of a killed process' standard output, so that `process.wait()` returns.

    asyncio reports the end of a process once its pipes have ended, and does not read from a pipe
    while twice its buffer size (128 KiB) is unread (python/cpython#119710).
    """
    transport = getattr(process, "_transport", None)
    pipe = None if transport is None else transport.get_pipe_transport(1)
    if pipe is not None:
        pipe.close()


def exit_text(status: int) -> str:
    """Return an exit status in words: "was killed by SIGKILL", "exited with status 1"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
