"""TRL's side from outside: a process of the interpreter that has it (trl_side.py runs in there)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.workload import Work


def trl_command(
    python: Path, model: Path, work: Work, *, threads: int, batch: int = 0, wait: int = 0
) -> list[str]:
    """What runs it; see trl_side.py. `batch` 0: all samples of a step at once."""
    numbers = {"--threads": threads, "--batch": batch or work.samples, "--wait": wait}
    return [
        *(str(python), "-m", "benchmarks.end_to_end.trl_side"),
        *(str(model), json.dumps(work.as_dict())),
        *(word for name, value in numbers.items() for word in (name, str(value))),
    ]


def trl_steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Its steps, {"step", "seconds", "reward"}, among whatever else it prints."""
    return [json.loads(line) for line in lines if line.startswith('{"step"')]
