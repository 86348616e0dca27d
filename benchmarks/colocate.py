"""Colocated against split devices, at the same number of devices.

    OMP_NUM_THREADS=1 python -m benchmarks.colocate [--quick] [--json]

Simulated engines and trainers of the research team (benchmarks/papers/pipeline/workload.py): five
policies on ten devices. Split: each policy has one engine on a device and one trainer on another.
Colocated (`pipeline.colocate`): both use both devices, so that rollout has twice the engines and
training twice the rate, but one waits for the other; training states move to the host and back, and
engines reload their weights. The last line is one JSON object: `colocate_over_split` (the seconds
per step of split divided by colocated's, mode `sync`), the same ratio in mode `micro_batch`, and
the seconds of every row.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.command import finish, options_of, run_program, scratch
from benchmarks.papers.pipeline.figures import Figures, figures
from benchmarks.papers.pipeline.measure import Run, cluster, run
from benchmarks.papers.pipeline.research_team import AGENTS
from benchmarks.papers.pipeline.workload import MA, Mode, Setup, job, quick
from troupe.client.cli.options import make_table
from troupe.job import JobSpec

_STEPS: Final = 4
# 14B parameters have 224 GB of weights, gradients and moments. Their transfer over the PCIe links
# of two devices takes about 2.2 s; one second here stands for sixteen, so the state is as large as
# the bytes that a core copies in 0.14 s.
_STATE_BYTES: Final = 256 << 20
_ROWS: Final = {
    "split_sync": Mode("sync", "split, sync", "engines | trainers", {"mode": "sync"}, _STEPS),
    "split_micro_batch": Mode(
        "micro_batch", "split, micro_batch", "engines | trainers", {"mode": "micro_batch"}, _STEPS
    ),
    "colocate_sync": Mode(
        "colocate", "colocated, sync", "taking turns", {"mode": "sync", "colocate": True}, _STEPS
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Run all rows, print the table and the JSON object."""
    options = options_of(__doc__, arguments)
    console = Console(stderr=options.json, width=None if options.json else 140)
    setup = quick(MA) if options.quick else MA
    with scratch() as directory:
        rows = asyncio.run(measure(setup, directory, console))
    table = make_table(
        ["devices, mode"],
        ["s per step", "rollout alone", "both", "training alone", "neither", "switching"],
        f"five policies on ten devices, {setup.stands_for}",
    )
    for done, found in rows.values():
        shares = (found.rollout_alone, found.both, found.training_alone, found.neither)
        cells = [f"{one:.2f}" for one in (found.seconds, *shares, switching(done))]
        table.add_row(done.mode.label, *cells)
    console.print(table)
    finish(as_json(rows, quick=options.quick), quiet=options.json)


async def measure(
    setup: Setup, directory: Path, console: Console
) -> dict[str, tuple[Run, Figures]]:
    """Measure all rows on one cluster."""
    rows = {}
    trace = directory / "trace"
    async with cluster(directory / "data", trace, trainers=len(AGENTS)) as client:
        for name, mode in _ROWS.items():
            done = await run(client, mode, on_devices(mode, setup, directory), trace)
            if not done.steps:
                raise SystemExit(f"{mode.label}: {done.failure}")
            rows[name] = done, figures(done)
            console.print(f"{mode.label}: {rows[name][1].seconds:.2f} s per step")
    return rows


def on_devices(mode: Mode, setup: Setup, directory: Path) -> JobSpec:
    """Return the job of one row: a policy's engines and trainers have one of its two devices each,
    or both."""
    each = 2 if mode.pipeline.get("colocate") else 1
    rate = setup.small["backward_tokens_per_second"] * each
    small = {**setup.small, "backward_tokens_per_second": rate, "state_bytes": _STATE_BYTES}
    spec = job(mode, replace(setup, small=small), directory)
    fields: dict[str, Any] = spec.model_dump(mode="json", exclude_unset=True)
    for policy in fields["policies"].values():
        policy["engine"]["replicas"] = each
    return JobSpec.model_validate(fields)


def switching(done: Run) -> float:
    """Return the seconds per step that switching took."""
    names = ("sleep", "offload", "wake")
    each = [sum(s.values.get(f"colocate/{n}_seconds", 0.0) for n in names) for s in done.steps]
    return statistics.fmean(each[1:] or each)


def as_json(rows: Mapping[str, tuple[Run, Figures]], *, quick: bool) -> dict[str, Any]:
    """Return the figures as JSON values."""
    seconds = {name: found.seconds for name, (_, found) in rows.items()}
    colocated = seconds["colocate_sync"]
    return {
        "colocate_over_split": round(seconds["split_sync"] / colocated, 3),
        "colocate_over_split_micro_batch": round(seconds["split_micro_batch"] / colocated, 3),
        "seconds": {name: round(one, 3) for name, one in seconds.items()},
        "switching_seconds": round(switching(rows["colocate_sync"][0]), 3),
        "quick": quick,
    }


if __name__ == "__main__":
    run_program(main)
