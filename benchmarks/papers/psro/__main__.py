"""PSRO with exact best responses and payoffs against OpenSpiel's, on Kuhn and Leduc poker.

    python -m benchmarks.papers.psro [--quick] [--json] [--learned] [--deep]

Both sides run here, one after the other, on one thread: pools that begin with the uniform policy
and grow by a best response per player, Nash equilibria of the meta-game by linear programming,
payoffs and best responses exact. Seconds are CPU seconds of the whole run from the game's name on,
without imports, and without measuring NashConv where PSRO itself does not need it.

It takes some minutes. `--deep` continues to NashConv 0.157 on Leduc poker, which takes three times
as long. `--learned` adds best responses that a DQN learns on both sides (`learned.py`), with the
same limit of CPU seconds for both; everything took twelve minutes on two busy cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.command import finish, options_of, run_program
from benchmarks.papers.psro.theirs import iterations, report_iteration
from benchmarks.references import ReferenceUnavailable, reference_python
from troupe.populations.psro import ExactPsro
from troupe.populations.tree import SequenceForm

# Requirement of OpenSpiel's linear program.
PACKAGES: Final = ("cvxpy==1.7.3", "ecos==2.0.14")
# Requirement of its DQN in PyTorch.
TREE: Final = "dm-tree==0.1.10"
_ITERATIONS: Final = 400


@dataclass(frozen=True)
class Point:
    """One iteration of one side."""

    iteration: int
    nash_conv: float
    seconds: float


def ours(game: str, target: float) -> list[Point]:
    """Return Troupe's iterations until NashConv is at most `target`."""
    began = time.process_time()
    found = []
    for one in ExactPsro(SequenceForm.of(game)).run(_ITERATIONS):
        found.append(Point(one.number, one.nash_conv, time.process_time() - began))
        report_iteration("Troupe", game, one.number, one.nash_conv, found[-1].seconds)
        if one.nash_conv <= target:
            break
    return found


def openspiels(python: Path, game: str, target: float) -> list[Point]:
    """Return OpenSpiel's iterations until NashConv is at most `target`."""
    found = iterations(python, "openspiel", game, _ITERATIONS, target)
    return [Point(one["iteration"], one["nash_conv"], one["seconds"]) for one in found]


def first(points: Sequence[Point], level: float) -> Point | None:
    """Return the first iteration at or below `level`."""
    return next((one for one in points if one.nash_conv <= level), None)


def row(name: str, side: str, level: float, point: Point | None) -> str:
    """Return a line of the table."""
    if point is None:
        return f"{name:12} {side:10} {level:>9g} {'not reached':>24}"
    return f"{name:12} {side:10} {level:>9g} {point.iteration:>10} {point.seconds:>13.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both, print a table and the JSON object."""
    flags = {
        "learned": "add best responses that a DQN learns on both sides",
        "deep": "Leduc poker to NashConv 0.157",
    }
    options = options_of(__doc__, arguments, flags=flags)
    levels = (3.0,) if options.quick else (1.0, 0.42, *([0.157] if options.deep else []))
    with tempfile.TemporaryDirectory(prefix="psro-") as directory:
        try:
            packages = (*PACKAGES, TREE) if options.learned else PACKAGES
            python = reference_python(packages, Path(directory))
        except ReferenceUnavailable as error:
            raise SystemExit(str(error)) from None
        lines = [f"{'game':12} {'side':10} {'NashConv':>9} {'iteration':>10} {'CPU seconds':>13}"]
        found = {}
        for game, goals in (("kuhn_poker", (1e-6,)), ("leduc_poker", levels)):
            for side, run in (
                ("Troupe", ours(game, goals[-1])),
                ("OpenSpiel", openspiels(python, game, goals[-1])),
            ):
                found[game, side] = run
                lines += [row(game, side, level, first(run, level)) for level in goals]
        learned: dict[str, float] = {}
        if options.learned:
            # Needs torch, unlike the rest.
            from benchmarks.papers.psro.learned import compare

            more, learned = compare(python, options.quick)
            lines += ["", *more]
    goal = levels[0] if options.quick else 0.42
    seconds = {
        side: point.seconds if (point := first(found["leduc_poker", side], goal)) else None
        for side in ("Troupe", "OpenSpiel")
    }
    result = {
        "kuhn_nashconv": found["kuhn_poker", "Troupe"][-1].nash_conv,
        "leduc_nashconv": found["leduc_poker", "Troupe"][-1].nash_conv,
        "cpu_seconds": seconds["Troupe"],
        "openspiel_cpu_seconds": seconds["OpenSpiel"],
        "leduc_goal": goal,
        **learned,
    }
    if not options.json:
        print("\n".join(lines))
    finish(result, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
