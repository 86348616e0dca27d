"""A side of the comparison: a process that samples a window of time on request.

All sides of a group are alive at once and measured alternately, so that other load on the machine
affects all of them. The idle sides are stopped, since a sampler otherwise continues by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from troupe.processes.ending import signal_group

_START_SECONDS: Final = 180.0
_END_SECONDS: Final = 20.0
# Time beyond the window itself, in which running work ends.
_LATE_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Side:
    """The command of one side."""

    name: str
    python: str | Path
    module: str
    world: str
    workers: int
    copies: int
    """Copies of the environment in each worker."""


@dataclass(frozen=True)
class Rate:
    """The result of one side in one window."""

    steps: float
    wall: float
    cpu: float

    @property
    def per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.wall

    @property
    def per_cpu_second(self) -> float:
        """Steps per CPU second of all its processes."""
        return self.steps / self.cpu


class SideFailed(Exception):
    """A side ended or did not answer; the message has its last output."""


class Running:
    """A side's process."""

    def __init__(self, side: Side, directory: Path) -> None:
        self.side = side
        arguments = [side.world, str(side.workers), str(side.copies)]
        self._errors = (directory / "stderr").open("w+")
        self._process = subprocess.Popen(
            [str(side.python), "-m", f"benchmarks.papers.sampling.{side.module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            # Sample Factory writes into its working directory.
            cwd=directory,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        )

    def wait_ready(self) -> None:
        """Wait until all its workers play, then stop it. Raises SideFailed."""
        self._said(_START_SECONDS)
        self._signal(signal.SIGSTOP)

    def window(self, seconds: float, workers: int = 0) -> Rate:
        """Measure `seconds` seconds; for Troupe with `workers` of its workers (0: all of them).

        Raises SideFailed.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_said` reports it
            self._process.stdin.write(f"{seconds} {workers}\n")
            self._process.stdin.flush()
        found = Rate(**self._said(2 * seconds + _LATE_SECONDS))
        self._signal(signal.SIGSTOP)
        return found

    def leave(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Wait until it and all that it started have ended."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._errors.close()

    def _said(self, seconds: float) -> dict[str, Any]:
        """Return its next line of JSON; peers also write other lines."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(('{"steps"', '{"ready"')):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            timer.cancel()
        self._errors.seek(0)
        said = self._errors.read().strip()[-800:]
        raise SideFailed(f"{self.side.name} on {self.side.world} has ended: {said}")

    def _signal(self, number: signal.Signals) -> None:
        # Ray's processes miss each other's heartbeats; they wait by themselves.
        if self.side.module != "rllib":
            signal_group(self._process.pid, number)

    def _kill(self) -> None:
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(sides: Sequence[Side]) -> Iterator[list[Running]]:
    """Run all sides, each warmed up; end them afterwards. Raises SideFailed."""
    with tempfile.TemporaryDirectory(prefix="sampling-", ignore_cleanup_errors=True) as directory:
        running: list[Running] = []
        try:
            for number, side in enumerate(sides):
                own = Path(directory) / str(number)
                own.mkdir()
                running.append(Running(side, own))
            for one in running:
                one.wait_ready()
            yield running
        finally:
            for one in running:
                one.leave()
            for one in running:
                one.close()


def ratio(ours: Sequence[Rate], theirs: Sequence[Rate]) -> float:
    """Return the ratio by wall-clock or by CPU seconds, whichever is less favourable to Troupe: the
    median of the ratios within the rounds."""
    pairs = list(zip(ours, theirs, strict=True))
    by_clock = statistics.median(a.per_second / b.per_second for a, b in pairs)
    by_cpu = statistics.median(a.per_cpu_second / b.per_cpu_second for a, b in pairs)
    return min(by_clock, by_cpu)
