"""OpenSpiel's side: its run in the reference's Python, with reports of progress."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any, Final

from benchmarks.command import progress

_RUN_SECONDS: Final = 1800.0


def report_iteration(
    side: str, game: str, iteration: int, nash_conv: float, seconds: float
) -> None:
    """Print a line of progress about an iteration."""
    said = f"{side}, {game}: iteration {iteration}, NashConv {nash_conv:.4g}, {seconds:.1f} CPU s"
    progress(said)


def iterations(python: Path, module: str, game: str, *arguments: object) -> list[dict[str, Any]]:
    """Run `python -m benchmarks.papers.psro.MODULE GAME ARGUMENTS`; return an object per iteration.

    Raises SystemExit with its last output if it fails or takes half an hour.
    """
    command = [str(python), "-m", f"benchmarks.papers.psro.{module}", game, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    errors = process.stderr
    listening = threading.Thread(target=lambda: said.extend(errors), daemon=True)
    listening.start()
    timer = threading.Timer(_RUN_SECONDS, process.kill)
    timer.start()
    found = []
    try:
        for line in process.stdout:
            one = json.loads(line)
            report_iteration("OpenSpiel", game, one["iteration"], one["nash_conv"], one["seconds"])
            found.append(one)
        failed = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    listening.join()
    if failed or not found:
        raise SystemExit(f"OpenSpiel's PSRO failed: {''.join(said).strip()[-500:]}")
    return found
