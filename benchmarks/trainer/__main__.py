"""Tokens per second and memory of the trainer's update, against TRL's on the same batch.

    python -m benchmarks.trainer [--quick | --model DIRECTORY] [--json] [--threads 1] [--steps 3]
                                 [--only BATCH]... [--forward-tokens N]

Both sides train the same model from the same weights on the same samples, with AdamW, clipping and
the same token-mean loss; the norms of their first gradients must agree. TRL's side is GRPOTrainer's
own loop from the batch on (theirs.py), without activation checkpointing, which is faster; one row
has it on both sides. Troupe's side is the learner as called by a worker (ours.py). Each side is a
separate process; with one thread it is measured in CPU seconds. Tokens are the samples' tokens,
without padding. Memory is the peak of resident memory above a process without a model. Troupe
computes a group's prompt once; `apart` is Troupe without that. `--forward-tokens`: tokens of
Troupe's passes, in place of the default, which is optimized for speed.

`over_trl`: the lowest ratio with different lengths; `over_trl_even`: with equal lengths;
`peak_memory_ratio`: the largest ratio of memory, Troupe over TRL; null without TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program
from benchmarks.references import TRL, ReferenceUnavailable, reference_python
from benchmarks.trainer.cases import Case, cases_of

_SECONDS: Final = 1800.0
# Tolerance of the first gradients' norms: a larger difference means another batch, or another loss.
_TOLERANCE: Final = 1e-3


@dataclass(frozen=True)
class Compared:
    """One case on both sides; `theirs` is None without TRL."""

    name: str
    tokens: int
    heavy: bool
    ours: dict[str, float]
    # Troupe, with a group's prompt computed for each of its answers.
    apart: dict[str, float]
    theirs: dict[str, float] | None

    @property
    def speed(self) -> float | None:
        """Troupe's tokens per second over TRL's."""
        return self.theirs["seconds"] / self.ours["seconds"] if self.theirs else None

    @property
    def memory(self) -> float | None:
        """Troupe's peak memory over TRL's."""
        return self.ours["peak_bytes"] / self.theirs["peak_bytes"] if self.theirs else None


def run_side(python: str | Path, module: str, arguments: Sequence[str], threads: int) -> Any:
    """Run a side, and return its output. Raises RuntimeError with the end of its errors if it
    fails."""
    command = [str(python), "-m", f"benchmarks.trainer.{module}", *arguments]
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **variables},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(
    size: str, case: Case, reference: Path | None, options: argparse.Namespace, *, again: bool
) -> Compared:
    """Compare both sides of a case; TRL with its fastest micro-batch."""
    arguments = [size, case.name, "--steps", str(options.steps)]
    if again:
        arguments.append("--checkpointing")
    own = [*arguments, "--forward-tokens", str(options.forward_tokens)]
    ours = run_side(sys.executable, "ours", own, options.threads)
    apart = run_side(sys.executable, "ours", [*own, "--apart"], options.threads)
    theirs = None
    if reference is not None:
        runs = [
            run_side(reference, "theirs", [*arguments, "--batch", str(batch)], options.threads)
            for batch in ((4,) if options.quick or again else (4, 8) if options.model else (8, 32))
        ]
        theirs = min(runs, key=lambda run: run["seconds"])
        # The fastest micro-batch does not always have the least memory.
        theirs["peak_bytes"] = min(run["peak_bytes"] for run in runs)
        off = abs(ours["grad_norm"] / theirs["grad_norm"] - 1)
        if off > _TOLERANCE:
            raise RuntimeError(f"{case.name}: gradients of the two sides differ by {off:.1e}")
    tokens = sum(len(ids) for ids, _, _ in case.rows())
    return Compared(_name(case, again=again), tokens, case.heavy, ours, apart, theirs)


def _name(case: Case, *, again: bool) -> str:
    return f"{case.name}, activations again" if again else case.name


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument(
        "--model", metavar="DIRECTORY", help="a checkpoint in place of small models"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--forward-tokens", type=int, default=0)
    parser.add_argument(
        "--only", action="append", metavar="BATCH", help="name of a batch in the table"
    )
    options = parser.parse_args()
    console = Console(stderr=True, quiet=options.json)
    size = options.model or ("quick" if options.quick else "full")
    cases = list(cases_of(size).values())
    with tempfile.TemporaryDirectory() as directory:
        reference: Path | None = None
        try:
            reference = reference_python([TRL], Path(directory) / "trl")
        except ReferenceUnavailable as error:
            console.print(f"without TRL: {error}")
        found = []
        for case, again in [*((case, False) for case in cases), (cases[0], True)]:
            if (name := _name(case, again=again)) in (options.only or [name]):
                console.print(f"{name} ...")
                found.append(compare(size, case, reference, options, again=again))
    console.print(_table(found))
    finish(_summary(found), quiet=options.json)


def _summary(found: Sequence[Compared]) -> dict[str, float | None]:
    heavy = [one.speed for one in found if one.heavy and one.speed is not None]
    even = [one.speed for one in found if not one.heavy and one.speed is not None]
    memory = [one.memory for one in found if one.memory is not None]
    return {
        "over_trl": min(heavy, default=None),
        "over_trl_even": min(even, default=None),
        "peak_memory_ratio": max(memory, default=None),
    }


def _table(found: Sequence[Compared]) -> Table:
    table = Table(
        "batch", "tokens", "tokens/s", "apart", "TRL's", "ratio", "peak MiB", "TRL's", "ratio"
    )
    for one in found:
        cells = []
        for field, scale in (("seconds", 1.0), ("peak_bytes", float(1 << 20))):
            sides = [one.ours, one.theirs]
            if field == "seconds":
                sides.insert(1, one.apart)
            for side in sides:
                if side is None:
                    cells.append("-")
                elif field == "seconds":
                    cells.append(f"{one.tokens / side[field]:,.0f}")
                else:
                    cells.append(f"{side[field] / scale:,.0f}")
            ratio = one.speed if field == "seconds" else one.memory
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        table.add_row(one.name, f"{one.tokens:,}", *cells)
    return table


if __name__ == "__main__":
    run_program(main)
