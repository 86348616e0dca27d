"""`python -m benchmarks.papers.trajectories [--quick] [--json]`

The gain of trajectory-level over batch-level rollout, for environments whose steps vary little and
much, and the gain of redundant trajectories when some stall or fail. Real processes and messages;
simulated engines and trainers. The last line of stdout is the JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program
from benchmarks.papers.pipeline.measure import StepEnd, step_ends
from benchmarks.papers.trajectories.workload import (
    FULL,
    QUICK,
    Row,
    Size,
    job,
    lockstep_rows,
    redundancy_rows,
)
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster

# Time limit of a row, in seconds.
_ROW_SECONDS = 900.0
_SIGMAS = (1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Figures:
    """Figures of a row: seconds per step in the steady state, from the end of the first step to the
    end of the last, their standard deviation over steps, and means of the steps' metrics."""

    seconds: float
    spread: float
    values: dict[str, float]
    cpu: float


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers.trajectories", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="small steps, about a minute in all")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if args.json else 140)
    size = QUICK if args.quick else FULL
    sigmas = (_SIGMAS[0], _SIGMAS[-1]) if args.quick else _SIGMAS
    with tempfile.TemporaryDirectory(prefix="troupe-trajectories-") as directory:
        found, tables = asyncio.run(measure(size, sigmas, Path(directory), console))
    for table in tables:
        console.print(table)
    found["quick"] = args.quick
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    finish(found, quiet=args.json)


async def measure(
    size: Size, sigmas: tuple[float, ...], directory: Path, console: Console
) -> tuple[dict[str, Any], list[Table]]:
    """Measure all rows, one after another on one cluster; return the JSON object, and tables."""
    async with cluster(directory / "data") as client:

        async def pair(rows: tuple[Row, Row]) -> tuple[Figures, Figures]:
            done = []
            for row in rows:
                done.append(await run(client, row, size, directory))
                console.print(f"{row.name}: {done[-1].seconds:.2f} s per step")
            return done[0], done[1]

        levels = [(one[0].sigma, await pair(one)) for one in lockstep_rows(sigmas)]
        spare = await pair(redundancy_rows(size))
    found = {
        "trajectory_over_batch": {f"{sigma:g}": _ratio(*two) for sigma, two in levels},
        "redundancy": _ratio(*spare),
        "seconds_per_step": {
            **{f"batch/{sigma:g}": round(a.seconds, 3) for sigma, (a, _) in levels},
            **{f"trajectory/{sigma:g}": round(b.seconds, 3) for sigma, (_, b) in levels},
            "no_spare": round(spare[0].seconds, 3),
            "redundant": round(spare[1].seconds, 3),
        },
        "bias": {
            name.removeprefix("redundancy/"): round(value, 3)
            for name, value in spare[1].values.items()
            if name.startswith("redundancy/")
        },
        "cpu": round(statistics.fmean([f.cpu for _, two in levels for f in two]), 1),
    }
    return found, [_level_table(levels, size), _spare_table(spare, size)]


@asynccontextmanager
async def cluster(data_dir: Path) -> AsyncIterator[AsyncClient]:
    """Yield the client of a cluster of real processes. Nothing calls its reward service."""
    os.environ["TROUPE_REWARD_WORKERS"] = "1"
    settings = ClusterSettings(data_dir=data_dir, trainers=1, panel=False)
    async with (
        EmbeddedCluster(settings) as running,
        AsyncClient(running.state.orchestrator_address) as client,
    ):
        yield client


async def run(client: AsyncClient, row: Row, size: Size, directory: Path) -> Figures:
    """Run a row's job to its end. Raises `JobFailed`."""
    handle = await client.submit(job(row, size, directory))
    psutil.cpu_percent()
    steps = await step_ends(handle)
    cpu = psutil.cpu_percent()
    await handle.result(timeout=_ROW_SECONDS)
    return figures(steps, cpu)


def figures(steps: list[StepEnd], cpu: float) -> Figures:
    """Return the figures of a row of at least two steps, of which the first is warm-up."""
    ends = [step.at for step in steps]
    each = [later - earlier for earlier, later in itertools.pairwise(ends)]
    names = {name for step in steps[1:] for name in step.values}
    return Figures(
        seconds=(ends[-1] - ends[0]) / len(each),
        spread=statistics.pstdev(each),
        values={
            name: statistics.fmean([step.values.get(name, 0.0) for step in steps[1:]])
            for name in names
        },
        cpu=cpu,
    )


def _ratio(slow: Figures, fast: Figures) -> float:
    return round(slow.seconds / fast.seconds, 3)


def _level_table(levels: list[tuple[float, tuple[Figures, Figures]]], size: Size) -> Table:
    count = size.queries_per_step * size.group_size
    table = Table(
        title=f"Environment steps of 10 s, sigma as shown (x {size.scale:g} here); {count} "
        f"trajectories of {size.turns} turns per step; SIMULATED engines (modelled time, no GPU)",
        caption="Seconds per step, mean of the steady state, mode async. Services, messages, rows, "
        "claims, commits and weight updates are real.",
    )
    for column in ("sigma", "batch-level", "± s", "trajectory-level", "± s", "x faster"):
        table.add_column(column, justify="right")
    for sigma, (batch, single) in levels:
        table.add_row(
            f"{sigma:g} s",
            f"{batch.seconds:.2f}",
            f"{batch.spread:.2f}",
            f"{single.seconds:.2f}",
            f"{single.spread:.2f}",
            f"{_ratio(batch, single):.2f}",
        )
    return table


def _spare_table(rows: tuple[Figures, Figures], size: Size) -> Table:
    table = Table(
        title="4 % of trajectories stall, 3 % fail and restart; SIMULATED engines",
        caption="Mode micro_batch. Bias: means per trajectory over kept and cancelled ones, up "
        "to their end.",
    )
    for column in ("", "s/step", "± s", "x faster", "kept: s", "turns", "cancelled: s", "turns"):
        table.add_column(column, justify="right")
    for name, row in zip(("as many as count", "a quarter more"), rows, strict=True):
        lengths = [
            f"{row.values[key]:.2f}" if (key := f"redundancy/{one}") in row.values else "-"
            for one in ("kept_seconds", "kept_turns", "cancelled_seconds", "cancelled_turns")
        ]
        ratio = f"{_ratio(rows[0], row):.2f}"
        table.add_row(name, f"{row.seconds:.2f}", f"{row.spread:.2f}", ratio, *lengths)
    return table


if __name__ == "__main__":
    run_program(main)
