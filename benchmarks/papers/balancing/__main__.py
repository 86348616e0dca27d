"""`python -m benchmarks.papers.balancing [--quick] [--json] [--out DIR]`

The same job on the same simulated engines without load balancing, with balancing within policies,
and additionally with engines that move between policies; then forced moves under load, counting
turns. The last line of stdout is the JSON object; the picture and the object go to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, machine, run_program
from benchmarks.papers.balancing.measure import Run, bench
from benchmarks.papers.balancing.migrations import Migrations, migrate
from benchmarks.papers.balancing.workload import FULL, QUICK, ROWS, Size, job
from benchmarks.papers.pipeline.research_team import AGENTS
from benchmarks.papers.pipeline.svg import COLOURS, LEFT, WIDTH, axis, document
from services.chassis import logs

# Heights of the parts of a picture.
_HEAD: Final = 30
_HEIGHT: Final = 120
_FOOT: Final = 34
_LEGEND: Final = 24


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers.balancing", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="small steps, few moves")
    parser.add_argument("--out", type=Path, help="directory for balancing.svg and balancing.json")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if args.json else 120)
    size = QUICK if args.quick else FULL
    # Refused moves are expected, and would fill the screen.
    logs.configure("benchmark", "error", "console")
    with tempfile.TemporaryDirectory(prefix="troupe-balancing-") as directory:
        runs, moved = asyncio.run(measure(size, Path(directory), console))
    console.print(_table(runs))
    console.print(
        f"{moved.moves} moves in {moved.seconds:.0f} s under load: {moved.asked} turns asked, "
        f"{moved.answered} answered, {moved.wrong} wrongly; {moved.handed_back} continued elsewhere"
    )
    for failure, count in moved.failures.most_common(5):
        console.print(f"  {count} x {failure}")
    found = as_json(runs, moved) | {
        "quick": args.quick,
        **machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "balancing.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "balancing.svg").write_text(draw(runs))
    finish(found, quiet=args.json)


async def measure(size: Size, directory: Path, console: Console) -> tuple[list[Run], Migrations]:
    """Measure all rows on one cluster, then the moves."""
    runs = []
    async with bench(directory / "data") as cluster:
        for row in ROWS:
            runs.append(await cluster.run(row, job(row, size, directory)))
            console.print(f"{row.label}: {runs[-1].seconds:.2f} s per step")
    return runs, await migrate(size.moves, directory)


def as_json(runs: list[Run], moved: Migrations) -> dict[str, Any]:
    """Return the JSON object of a run."""
    seconds = {run.row.name: run.seconds for run in runs}
    return {
        "both_over_none": round(seconds["none"] / seconds["both"], 3),
        "intra_over_none": round(seconds["none"] / seconds["intra"], 3),
        "lost": moved.lost,
        "moves": moved.moves,
        "asked": moved.asked,
        "handed_back": moved.handed_back,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "disparity": {run.row.name: round(_disparity(run), 2) for run in runs},
        "engines_moved": {run.row.name: run.total("balancing/moves") for run in runs},
        "cpu": {run.row.name: run.cpu for run in runs},
    }


def _disparity(run: Run) -> float:
    return statistics.fmean(look.disparity for look in run.measured)


def _table(runs: list[Run]) -> Table:
    table = Table(title="Load balancing, simulated engines")
    for heading in ("balancing", "s per step", "x none", "disparity", "moves", "CPU"):
        table.add_column(heading, justify="left" if heading == "balancing" else "right")
    for run in runs:
        table.add_row(
            run.row.label,
            f"{run.seconds:.2f}",
            f"{runs[0].seconds / run.seconds:.2f}",
            f"{_disparity(run):.1f}",
            f"{run.total('balancing/moves'):.0f}",
            f"{run.cpu:.0f} %",
        )
    return table


def draw(runs: list[Run]) -> str:
    """Draw the backlog per engine of each policy, with the same axes in all rows; the distance
    between the highest and the lowest line is the disparity."""
    seconds = max(run.measured[-1].at - run.measured[0].at for run in runs)
    most = max(p for run in runs for look in run.measured for p in look.pressures.values())
    parts = [_legend()]
    y = _LEGEND
    for run in runs:
        parts.append(f'<g transform="translate(0,{y})">{_panel(run, seconds, most)}</g>')
        y += _HEAD + _HEIGHT + _FOOT
    return document(parts, y)


def _panel(run: Run, seconds: float, most: float) -> str:
    looks = run.measured
    scale, start, floor = WIDTH / seconds, looks[0].at, _HEAD + _HEIGHT
    title = f"{run.row.label}: {run.seconds:.1f} s per step (simulated)"
    parts = [
        f'<text class="t" x="{LEFT}" y="18">{escape(title)}</text>',
        f'<rect class="l" x="{LEFT}" y="{_HEAD}" width="{WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="{LEFT - 8}" y="{_HEAD + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{LEFT - 8}" y="{floor}" text-anchor="end">0</text>',
    ]
    for policy in AGENTS:
        points = " ".join(
            f"{LEFT + (look.at - start) * scale:.1f},"
            f"{floor - _HEIGHT * look.pressures.get(policy, 0.0) / most:.1f}"
            for look in looks
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" '
            'stroke-width="1.5"/>'
        )
    for step in run.steps:
        if start <= step.at <= looks[-1].at:
            x = LEFT + (step.at - start) * scale
            parts.append(f'<path class="e" d="M{x:.1f} {_HEAD - 6}V{floor}"/>')
    parts.append(axis(floor, seconds, scale))
    return "".join(parts)


def _legend() -> str:
    parts = [f'<text x="{LEFT - 8}" y="14" text-anchor="end">turns/engine</text>']
    for number, policy in enumerate(AGENTS):
        x = LEFT + 110 * number
        parts.append(f'<path d="M{x} 10h16" stroke="{COLOURS[policy]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22}" y="14">{policy}</text>')
    return "".join(parts)


if __name__ == "__main__":
    run_program(main)
