"""Do small networks reach what was published? Three seeds per task.

`--only mappo` runs one of them. Draws `docs/figures/networks-TASK.svg` and writes the numbers to
`docs/figures/networks.json`, where other tasks' stay. The last line is a JSON object: per task the
plateau of every seed, their mean, what was published, whether it was reached, CPU seconds.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.command import finish, options_of, run_program
from benchmarks.networks.curve import Curve, learn
from benchmarks.networks.picture import draw
from benchmarks.networks.tasks import TASKS, Task

FIGURES: Final = Path(__file__).resolve().parents[2] / "docs" / "figures"
SEEDS: Final = (1, 2, 3)


def summary(task: Task, curves: Sequence[Curve]) -> dict[str, Any]:
    """A task's part of the JSON object."""
    plateaus = [round(curve.plateau, 2) for curve in curves]
    mean = sum(plateaus) / len(plateaus)
    return {
        "plateaus": plateaus,
        "mean": round(mean, 2),
        "published": task.published,
        "margin": task.margin,
        "reached": task.reached(mean),
        "steps": curves[0].steps[-1],
        "cpu_seconds": [curve.seconds for curve in curves],
        "load": [curve.load for curve in curves],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for and print it."""
    options = options_of(__doc__, arguments, parts=list(TASKS))
    torch.set_num_threads(1)
    tasks = [TASKS[options.only]] if options.only else list(TASKS.values())
    found: dict[str, Any] = {}
    for task in tasks:
        curves = []
        for seed in SEEDS[:1] if options.quick else SEEDS:
            updates = 2 if options.quick else task.updates
            curves.append(learn(task, seed, updates, lambda line: print(line, file=sys.stderr)))
        found[task.name] = summary(task, curves)
        if not options.quick:
            _keep(task, curves, found[task.name])
    if not options.json:
        print(f"{'task':8} {'environment':14} {'plateaus':>26} {'mean':>9} {'published':>16}")
        for name, row in found.items():
            seeds = " ".join(f"{value:.2f}" for value in row["plateaus"])
            stated = f"{row['published']:g} +- {row['margin']:g}"
            print(
                f"{name:8} {TASKS[name].environment:14} {seeds:>26} {row['mean']:9.2f} {stated:>16}"
            )
    finish(found, quiet=options.json)


def _keep(task: Task, curves: Sequence[Curve], row: dict[str, Any]) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / f"networks-{task.name}.svg").write_text(draw(task, curves))
    path = FIGURES / "networks.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[task.name] = {
        **row,
        "source": task.source,
        "curves": [dataclasses.asdict(curve) for curve in curves],
    }
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    run_program(main)
