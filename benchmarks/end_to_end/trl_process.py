"""TRL's side seen from outside: a process of the interpreter that has TRL and runs trl_side.py."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.command import end
from benchmarks.end_to_end.workload import Work
from benchmarks.references import peer_environment

# Rounds are requested one by one, so that this many steps are never done.
_ENDLESS: Final = 1_000_000


def trl_command(python: Path, model: Path, work: Work, *, threads: int, wait: int = 0) -> list[str]:
    """Return the command that runs it; see trl_side.py."""
    numbers = {"--threads": threads, "--wait": wait}
    return [
        *(str(python), "-m", "benchmarks.end_to_end.trl_side"),
        *(str(model), json.dumps(work.as_dict())),
        *(word for name, value in numbers.items() for word in (name, str(value))),
    ]


def trl_steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return its steps, {"step", "seconds", "reward"}, from all its output."""
    return [json.loads(line) for line in lines if line.startswith('{"step"')]


class Trl:
    """GRPOTrainer as a process that trains on request, and sleeps meanwhile."""

    def __init__(self, python: Path, model: Path, work: Work, *, threads: int, steps: int) -> None:
        """`steps`: steps of a round."""
        self._samples, self._steps = work.samples, steps
        command = trl_command(python, model, work.lasting(_ENDLESS), threads=threads, wait=steps)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=peer_environment(threads),
        )

    def round(self) -> float:
        """Train one round; return samples per second of the median step. Blocking."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds: list[float] = []
        while len(seconds) < self._steps:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("TRL's process ended; run its command by hand to see why")
            seconds += [step["seconds"] for step in trl_steps([line])]
        return self._samples / statistics.median(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self._process)
