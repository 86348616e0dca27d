"""`python -m benchmarks.pipeline [--quick] [--json] [--out DIR] [--modes ...] [--no-learning]`

Every pipeline mode runs the same job on the same cluster of real processes, one after another:
first with paced engines and trainers (how fast), then with real tiny ones (what is learned). The
last line of stdout is the JSON object; pictures and the object go to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.pipeline import equality, report
from benchmarks.pipeline.figures import figures, window
from benchmarks.pipeline.measure import Run, cluster, run
from benchmarks.pipeline.svg import Panel, draw
from benchmarks.pipeline.workload import FULL, QUICK, job, modes

_LEARNED = ("sync", "micro_batch", "async")
_LEARNING_STEPS = 12


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small step, about a minute in all")
    parser.add_argument("--modes", nargs="+", help="only these rows; `none`: no first table")
    parser.add_argument("--no-learning", action="store_true", help="only the first table")
    parser.add_argument("--out", type=Path, help="directory for pictures and pipeline.json")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if args.json else 160)
    with tempfile.TemporaryDirectory(prefix="troupe-pipeline-") as directory:
        rows, lessons = asyncio.run(measure(args, Path(directory), console))
    if rows:
        console.print(report.speed_table(rows))
    if lessons:
        console.print(report.lesson_table(lessons))
    found = report.as_json(rows, lessons)
    found["quick"] = args.quick
    found["machine"] = f"{psutil.cpu_count()} cores, {platform.machine()}"
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n")
        write_pictures([row for row, f in rows if f is not None], args.out)
    print(json.dumps(found))


async def measure(
    args: argparse.Namespace, directory: Path, console: Console
) -> tuple[list[report.Row], list[equality.Lesson]]:
    """All rows of both tables, on one cluster."""
    size = QUICK if args.quick else FULL
    trace = directory / "trace"
    rows: list[report.Row] = []
    lessons: list[equality.Lesson] = []
    async with cluster(directory / "data", trace) as client:
        for mode in modes(args.quick):
            if args.modes and mode.name not in args.modes:
                continue
            done = await run(client, mode, job(mode, size, directory), trace)
            rows.append((done, figures(done) if done.steps else None))
            console.print(f"{mode.label}: {_told(rows[-1])}")
        for name in () if args.no_learning else _LEARNED:
            spec = equality.job(name, _LEARNING_STEPS, directory)
            lessons.append(await equality.learn(client, name, spec))
            console.print(f"learning in mode {name}: {lessons[-1].failure or 'done'}")
    return rows, lessons


def _told(row: report.Row) -> str:
    done, found = row
    return done.failure if found is None else f"{found.seconds:.2f} s per step"


def write_pictures(runs: list[Run], out: Path) -> None:
    """One picture per mode over two of its steps, and one of all over the same time."""
    panels = []
    for one in runs:
        steps = [step.at for step in one.steps]
        panels.append(Panel(_title(one), one, steps[0], steps[min(2, len(steps) - 1)]))
        (out / f"pipeline-{one.mode.name}.svg").write_text(draw(panels[-1:]))
    if panels:
        seconds = min(max(2 * _step(one) for one in runs[1:] or runs), 60.0)
        (out / "pipeline.svg").write_text(
            draw([Panel(p.title, p.run, p.start, p.start + seconds) for p in panels])
        )


def _title(one: Run) -> str:
    return f"{one.mode.label}: {_step(one):.1f} s per step (paced)"


def _step(one: Run) -> float:
    start, end = window(one)
    return (end - start) / (len(one.steps) - 1)


if __name__ == "__main__":
    main()
