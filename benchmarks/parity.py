"""Does a job learn as well as TRL's GRPOTrainer? Same tasks, weights, batches, settings, seeds.

    python -m benchmarks.parity [--quick] [--json] [--out DIR] [--seeds N] [--dtype T]

For every seed, both begin with the same weights (93,000 parameters) and train on the same 256 tasks
with the same settings of GRPO and AdamW, on policy. The drawn tokens differ, since each has its own
generator; so the comparison is the reward of the last steps over seeds. The verdict is parity if
the difference of the means is within noise (Welch's t-test, two-sided, 5 %), and its 95 %
confidence interval is narrow enough (half its width at most 0.03 of reward). TRL is installed
separately (benchmarks/references.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.command import finish, run_program, scratch
from benchmarks.end_to_end.trl_process import trl_command, trl_steps
from benchmarks.end_to_end.troupe_side import cluster, job, run
from benchmarks.end_to_end.workload import DTYPES, SMALL, Work, save_model
from benchmarks.references import TRL, peer_environment, reference_python
from troupe.contracts import metric_names
from troupe.recipes.curves import draw_curves

SEEDS: Final = 5
FULL: Final = Work(steps=60, lr=1.5e-3)
QUICK: Final = Work(steps=4, lr=1.5e-3, queries=4)
# Last steps whose mean is the final reward of a seed; with fewer steps, the choice of tasks
# dominates.
LAST: Final = 10
HALF_WIDTH: Final = 0.03
_TRL_SECONDS: Final = 1200.0

Curve = list[float]


def trl_curve(python: Path, model: Path, work: Work) -> Curve:
    """Return the mean reward of every step."""
    done = subprocess.run(
        trl_command(python, model, work, threads=1),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=_TRL_SECONDS,
        env=peer_environment(threads=1),
    )
    return [step["reward"] for step in trl_steps(done.stdout.splitlines())]


def compare(ours: Sequence[Curve], theirs: Sequence[Curve], *, peer: str = "trl") -> dict[str, Any]:
    """Return the statistics of all seeds' curves; `parity` is the verdict. `peer`: the key of
    `theirs`."""
    last = min(LAST, *(len(curve) for curve in (*ours, *theirs)))
    final = _test([curve[-last:] for curve in ours], [curve[-last:] for curve in theirs], peer)
    low, high = final["interval"]
    return {
        "parity": bool(final["p"] > 0.05 and (high - low) / 2 <= HALF_WIDTH),
        **final,
        # A difference in learning speed would show here before the end.
        "whole_curve": _test(ours, theirs, peer),
        "last_steps": last,
        "seeds": len(ours),
        "curves": {
            name: [[round(value, 4) for value in curve] for curve in curves]
            for name, curves in (("troupe", ours), (peer, theirs))
        },
    }


def _test(ours: Sequence[Curve], theirs: Sequence[Curve], peer: str) -> dict[str, Any]:
    """Return Welch's test of the curves' means."""
    mine, others = [statistics.fmean(c) for c in ours], [statistics.fmean(c) for c in theirs]
    test = stats.ttest_ind(mine, others, equal_var=False)
    return {
        "troupe": _summary(mine),
        peer: _summary(others),
        "difference": round(statistics.fmean(mine) - statistics.fmean(others), 4),
        "interval": [round(float(end), 4) for end in test.confidence_interval(0.95)],
        "p": round(float(test.pvalue), 3),
    }


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(statistics.stdev(values), 4),
        "seeds": [round(value, 4) for value in values],
    }


async def measure(directory: Path, work: Work, seeds: int, console: Console) -> dict[str, Any]:
    """Measure both sides, seed after seed."""
    python = reference_python([TRL], directory / "reference")
    ours: list[Curve] = []
    theirs: list[Curve] = []
    async with cluster(directory / "data", threads=1) as client:
        for seed in range(seeds):
            own = replace(work, seed=seed)
            model = save_model(directory / f"model-{seed}", SMALL, seed)
            steps = await run(client, job(f"parity-{seed}", [model], own))
            ours.append([step.values[metric_names.REWARD_MEAN] for step in steps])
            theirs.append(await asyncio.to_thread(trl_curve, python, model, own))
            console.print(
                f"seed {seed}: last reward {ours[-1][-1]:.3f}, TRL's {theirs[-1][-1]:.3f}"
            )
    return compare(ours, theirs)


def told(found: dict[str, Any]) -> Table:
    """Return the table of the mean reward over seeds at some steps, and the final one of each
    seed."""
    table = Table(title="Reward, mean over seeds ± sd")
    curves = found["curves"]
    steps = len(curves["trl"][0])
    shown = sorted({*range(0, steps, max(1, steps // 8)), steps - 1})
    for heading in ("", *(f"step {step + 1}" for step in shown), f"last {found['last_steps']}"):
        table.add_column(heading, justify="right")
    for name in ("troupe", "trl"):
        at = [[curve[step] for curve in curves[name]] for step in shown]
        cells = [f"{statistics.fmean(v):.3f} ± {statistics.stdev(v):.3f}" for v in at]
        table.add_row(name, *cells, f"{found[name]['mean']:.3f} ± {found[name]['sd']:.3f}")
    return table


def draw(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return an SVG document of `{system: [reward by step of each seed]}`."""
    return draw_curves(
        {name: [list(enumerate(curve, 1)) for curve in seeds] for name, seeds in curves.items()},
        title="reward; thick: mean of seeds",
        axis="steps",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two seeds of a few steps, a smoke run"
    )
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS}")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="type of products")
    parser.add_argument("--out", type=Path, help="directory for parity.svg and parity.json")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json, width=150)
    work, seeds = (QUICK, 2) if options.quick else (FULL, SEEDS)
    work = replace(work, dtype=options.dtype)
    with scratch() as directory:
        found = asyncio.run(measure(directory, work, options.seeds or seeds, console))
    console.print(told(found))
    low, high = found["interval"]
    console.print(
        f"difference {found['difference']:+.3f}, 95 % interval [{low:+.3f}, {high:+.3f}], "
        f"p = {found['p']:.2f}: {'within noise' if found['parity'] else 'parity not shown'}"
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "parity.json").write_text(json.dumps(found) + "\n")
        (options.out / "parity.svg").write_text(draw(found["curves"]))
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
