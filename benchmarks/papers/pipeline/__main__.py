"""The modes of the pipeline against each other, in two published set-ups.

    python -m benchmarks.papers.pipeline [--quick] [--json] [--out DIR] [--setups ...] [--modes ...]

Every pipeline mode runs the same job on the same cluster of real processes, one after another:
first with simulated engines and trainers (for speed), in each of two published set-ups, then with
real tiny ones (for learning). The last line of stdout is the JSON object; pictures and the object
go to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.command import finish, machine, run_program
from benchmarks.papers.pipeline import equality, report
from benchmarks.papers.pipeline.figures import figures, window
from benchmarks.papers.pipeline.measure import Run, cluster, run
from benchmarks.papers.pipeline.svg import Panel, draw
from benchmarks.papers.pipeline.workload import SETUPS, job, modes, quick

_LEARNED = ("sync", "micro_batch", "async")
_LEARNING_STEPS = 12


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers.pipeline", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="a small step, about a minute in all")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--modes", nargs="+", help="only these rows; `none`: no first table")
    parser.add_argument("--no-learning", action="store_true", help="only the tables of speed")
    parser.add_argument("--out", type=Path, help="directory for pictures and pipeline.json")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if args.json else 160)
    with tempfile.TemporaryDirectory(prefix="troupe-pipeline-") as directory:
        tables, lessons = asyncio.run(measure(args, Path(directory), console))
    for setup, rows in tables:
        console.print(report.speed_table(setup, rows))
        console.print(report.ratio_table(setup, rows))
    if lessons:
        console.print(report.lesson_table(lessons))
    found = report.as_json(tables, lessons)
    found["quick"] = args.quick
    found |= machine()
    found["load_average"] = [round(load, 1) for load in psutil.getloadavg()]
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n")
        for setup, rows in tables:
            write_pictures(setup.name, [row for row, f in rows if f is not None], args.out)
    finish(found, quiet=args.json)


async def measure(
    args: argparse.Namespace, directory: Path, console: Console
) -> tuple[list[report.Measured], list[equality.Lesson]]:
    """Measure all rows of all tables on one cluster."""
    trace = directory / "trace"
    tables: list[report.Measured] = []
    lessons: list[equality.Lesson] = []
    async with cluster(directory / "data", trace) as client:
        for setup in (SETUPS[name] for name in args.setups):
            rows: list[report.Row] = []
            chosen = quick(setup) if args.quick else setup
            for mode in modes():
                if args.modes and mode.name not in args.modes:
                    continue
                done = await run(client, mode, job(mode, chosen, directory), trace)
                rows.append((done, figures(done) if done.steps else None))
                console.print(f"{setup.name}, {mode.label}: {_told(rows[-1])}")
            if rows:
                tables.append((chosen, rows))
        for name in () if args.no_learning else _LEARNED:
            spec = equality.job(name, _LEARNING_STEPS, directory)
            lessons.append(await equality.learn(client, name, spec))
            console.print(f"learning in mode {name}: {lessons[-1].failure or 'done'}")
    return tables, lessons


def _told(row: report.Row) -> str:
    done, found = row
    return done.failure if found is None else f"{found.seconds:.2f} s per step"


def write_pictures(setup: str, runs: list[Run], out: Path) -> None:
    """Write one picture per mode over two of its steps, and one of all modes over the same time."""
    panels = []
    for one in runs:
        start, end = window(one)
        panels.append(Panel(_title(one), one, start, min(end, start + 2 * _step(one))))
        (out / f"{setup}-{one.mode.name}.svg").write_text(draw(panels[-1:]))
    if panels:
        seconds = min(max(2 * _step(one) for one in runs[1:] or runs), 60.0)
        (out / f"{setup}.svg").write_text(
            draw([Panel(p.title, p.run, p.start, p.start + seconds) for p in panels])
        )


def _title(one: Run) -> str:
    return f"{one.mode.label}: {_step(one):.1f} s per step (simulated)"


def _step(one: Run) -> float:
    return figures(one).seconds


if __name__ == "__main__":
    run_program(main)
