"""The cost of flushing every write to disk before Redis answers it.

    python -m benchmarks.redis_durability [--rounds 5] [--json]

The same steps (append, reward, claim, commit) alternate between two stores, one with `appendfsync
everysec` and one with `always`. Ratios are of medians. They depend on the disk, so run it on the
disk of Redis's data.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program
from benchmarks.experience_store.served import Ending, Timings, create, drop, run_step
from benchmarks.experience_store.servers import Stub, started
from benchmarks.experience_store.workload import Shape, make_appends
from troupe.cluster.settings import Fsync

SETTINGS: tuple[Fsync, ...] = ("everysec", "always")
WRITERS = (1, 8)
SHAPE = Shape(tokens=4096, queries=8, turns=2)


@dataclass
class Figures:
    """Figures of one setting and number of writers."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each step."""
    appends: list[float] = field(default_factory=list)
    """Seconds of each AppendTrajectory."""

    @property
    def rows_per_second(self) -> float:
        """Rows appended, rewarded, claimed and committed per second."""
        return SHAPE.rows / statistics.median(self.seconds)

    @property
    def append_ms(self) -> float:
        """Median milliseconds of an AppendTrajectory."""
        return statistics.median(self.appends) * 1000


async def play(stub: Stub, writers: int, figures: Figures) -> None:
    """Run one step of a fresh job."""
    job = await create(stub)
    timings = Timings()
    endings = [Ending.of(append) for append in make_appends(job, 0, SHAPE)]
    seconds = await run_step(stub, SHAPE, job, endings, writers, timings)
    figures.seconds.append(seconds)
    figures.appends += timings.calls["append"]
    await drop(stub, job)


async def measure(directory: Path, rounds: int) -> dict[tuple[Fsync, int], Figures]:
    """Measure both settings alternately; the first round is warm-up and does not count."""
    found: dict[tuple[Fsync, int], Figures] = {}
    homes = {fsync: directory / fsync for fsync in SETTINGS}
    for home in homes.values():
        home.mkdir()
    with started(homes["everysec"]) as lazy, started(homes["always"], "always") as eager:
        async with lazy.stub() as first, eager.stub() as second:
            for number in range(rounds + 1):
                for writers in WRITERS:
                    for fsync, stub in zip(SETTINGS, (first, second), strict=True):
                        figures = found.setdefault((fsync, writers), Figures())
                        await play(stub, writers, figures if number else Figures())
    return found


def main() -> None:
    """Measure, print a table, and end with a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="directory of Redis's data (default: TMPDIR)")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        found = asyncio.run(measure(Path(directory), arguments.rounds))
    if not arguments.json:
        table = Table("appendfsync", "writers", "rows/s", "append, median ms")
        for (fsync, writers), figures in found.items():
            table.add_row(
                fsync, str(writers), f"{figures.rows_per_second:.0f}", f"{figures.append_ms:.2f}"
            )
        Console().print(table)
    report: dict[str, float] = {}
    for writers in WRITERS:
        lazy, eager = found["everysec", writers], found["always", writers]
        report[f"always_over_everysec_{writers}"] = round(
            eager.rows_per_second / lazy.rows_per_second, 3
        )
        report[f"append_ms_everysec_{writers}"] = round(lazy.append_ms, 3)
        report[f"append_ms_always_{writers}"] = round(eager.append_ms, 3)
    finish(report, quiet=arguments.json)


if __name__ == "__main__":
    run_program(main)
