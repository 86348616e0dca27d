"""Functions that no service should be harmed by. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def where() -> dict[str, Any]:
    return {"uid": os.getuid(), "pids": len(os.listdir("/proc")), "environment": dict(os.environ)}


def reads(path: str) -> str:
    return Path(path).read_text()


def lists(path: str) -> list[str]:
    return sorted(os.listdir(path))


def writes(path: str) -> None:
    Path(path).write_text("here")


def reads_all(paths: list[str]) -> list[str]:
    return [_done(reads, path) for path in paths]


def writes_all(paths: list[str]) -> list[str]:
    return [_done(writes, path) for path in paths]


def _done(what: Callable[[str], Any], path: str) -> str:
    try:
        what(path)
    except OSError as error:
        return type(error).__name__
    return "done"


def connects(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=2).close()


def fork_bomb(most: int) -> int:
    """How many children it got."""
    children = 0
    try:
        while children < most:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            children += 1
    except OSError:
        pass
    return children


def memory_hog(mib: int, processes: int) -> list[int]:
    """Exit codes of children that each take so much, all at once however slowly they start."""
    program = f"x = b'x' * ({mib} << 20); print(len(x), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    hogs = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(processes)]
    for hog in hogs:
        hog.stdout.readline()  # it has succeeded, or is dead
    for hog in hogs:
        hog.stdin.close()
    return [hog.wait() for hog in hogs]


def hogs_alone(mib: int) -> int:
    return len(b"x" * (mib << 20))


def fills_the_disk(path: str, mib: int) -> int:
    """MiB written before it was stopped."""
    written = 0
    try:
        with open(path, "wb") as file:
            for _ in range(mib):
                file.write(bytes(1 << 20))
                file.flush()
                written += 1
    except OSError:
        pass
    return written


def shouts(mib: int) -> str:
    for _ in range(mib):
        print("x" * (1 << 20))
    print("the last words")
    raise ValueError("hoarse")


def answers_too_much(mib: int) -> str:
    return "x" * (mib << 20)


def _call_myself(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME


def never_ends() -> None:
    _call_myself("never_ends")
    while True:
        pass


def stubborn() -> None:
    """Leaves a child that ignores SIGTERM, in a separate session, and never ends."""
    _call_myself("stubborn")
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    time.sleep(600)


def forges(text: str) -> None:
    """Write an invalid answer where answers are read."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text.encode())
        except OSError:
            continue
    time.sleep(1)


def counts_in_background(path: str) -> None:
    """Leaves a process in a separate session that counts for ever in a file."""
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        _call_myself("ticker")
        count = 0
        while True:
            count += 1
            Path(path).write_text(str(count))
            if count == 1:
                os.write(told, b"x")
    os.read(ready, 1)


def waits_for(path: str) -> str:
    """Return another call's text there; a file exists before its content."""
    while not (Path(path).exists() and (text := Path(path).read_text())):
        time.sleep(0.01)
    return text


def looks_twice(path: str, seconds: float) -> list[bool]:
    """Whether a file is there, now and later."""
    found = [Path(path).exists()]
    time.sleep(seconds)
    return [*found, Path(path).exists()]


def attacks_its_supervisor() -> list[str]:
    """Return the results of reading its memory and its files; a signal has no effect."""
    os.kill(1, signal.SIGKILL)
    os.kill(1, signal.SIGTERM)
    found = []
    for path in ("mem", "environ", "fd/0"):
        try:
            Path("/proc/1", path).read_bytes()
            found.append("done")
        except OSError as error:
            found.append(type(error).__name__)
    return found


def scores_slowly(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def runs(code: str, arguments: list[str]) -> str:
    """Return the output of a model's program, which harms everything except this process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
