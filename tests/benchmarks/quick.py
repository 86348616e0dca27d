"""A benchmark's quick run, from its command line to its object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.command import machine


def quick_run(
    module: str, *arguments: str, seconds: float = 900, environment: dict[str, str] | None = None
) -> Any:
    """Return the last line of `python -m benchmarks.MODULE --quick --json ARGUMENTS`, without the
    machine."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return figures(done.stdout)


def figures(printed: str) -> Any:
    """Return the object in a benchmark's last line, without the machine."""
    found = json.loads(printed.splitlines()[-1])
    # Figures of different instruction sets are not comparable: every benchmark names its own.
    assert {name: found.pop(name) for name in machine()} == machine()
    return found
