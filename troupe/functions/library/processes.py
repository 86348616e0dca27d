"""Programs run to their end or to a deadline, with what they printed, however much that was."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# Kept of each stream: so much of its beginning, and so much of its end.
_KEPT: Final = 8 << 10
_READ: Final = 64 << 10
# What is still in the pipes when a program has ended; a child of its own may hold them open.
_LINGER_SECONDS: Final = 0.2


@dataclass
class Text:
    """The beginning and the end of a stream."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, part: bytes) -> None:
        """What came next."""
        room = _KEPT - len(self.head)
        self.head += part[:room]
        self.tail += part[room:]
        over = len(self.tail) - _KEPT
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def __str__(self) -> str:
        head, tail = (part.decode(errors="replace") for part in (self.head, self.tail))
        return f"{head}\n... {self.dropped:,} bytes ...\n{tail}" if self.dropped else head + tail


@dataclass(frozen=True)
class Ended:
    """How a program ended: `status` is its exit status, negative for the signal that killed it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool


class Program:
    """One that runs, with its process group."""

    def __init__(
        self, command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str]
    ) -> None:
        self.stdout, self.stderr = Text(), Text()
        self._input = memoryview(stdin.encode(errors="replace"))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )

    def pipes(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` tell when there is something to read or room to write."""
        process = self.process
        assert process.stdin is not None
        for stream, text in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, lambda s=stream, t=text: _read(s, t))
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, self._write)

    def kill(self) -> None:
        """End it with all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _write(self) -> bool:
        assert self.process.stdin is not None
        try:
            self._input = self._input[os.write(self.process.stdin.fileno(), self._input) :]
        except BlockingIOError:
            return True
        except OSError:  # it does not read
            self._input = self._input[:0]
        if not self._input:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        return bool(self._input)


def run(programs: Sequence[Program], seconds: float) -> list[Ended]:
    """Wait for all of them, `seconds` at most; then what still runs is killed."""
    deadline = time.monotonic() + seconds
    late: set[int] = set()
    linger = 0.0
    with selectors.DefaultSelector() as selector:
        for program in programs:
            program.pipes(selector)
        while selector.get_map():
            now = time.monotonic()
            running = [p for p in programs if p.process.poll() is None]
            if now >= deadline and running:
                late.update(p.process.pid for p in running)
                for program in running:
                    program.kill()
                deadline = now + _LINGER_SECONDS
            if not running:
                linger = linger or now + _LINGER_SECONDS
                if now >= linger:
                    break
            for key, _ in selector.select(min(0.05, max(0.0, deadline - now))):
                file = key.fileobj
                if not key.data():
                    selector.unregister(file)
    return [_ended(program, late) for program in programs]


def _ended(program: Program, late: set[int]) -> Ended:
    process = program.process
    program.kill()  # what it left behind in its group
    status = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return Ended(status, str(program.stdout), str(program.stderr), process.pid in late)


def _read(stream: object, text: Text) -> bool:
    """Take what is there; False at the end."""
    try:
        part = os.read(stream.fileno(), _READ)  # type: ignore[attr-defined]
    except BlockingIOError:
        return True
    text.add(part)
    return bool(part)
