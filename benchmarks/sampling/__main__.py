"""Environment steps per second of small networks, beside RLlib's and Sample Factory's.

    python -m benchmarks.sampling [--quick] [--json] [--only peers|workers]

MPE's simple_spread (three agents, 25 steps) and Leduc poker against uniformly random play, networks
of two hidden layers of 64, as many worker processes as cores on every side; one after another, each
in its own Python. What is counted has come back to the driver. Sampling alone: nobody trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.command import options_of
from benchmarks.references import ReferenceUnavailable, reference_python

RLLIB: Final = ("ray[rllib]==2.60.0",)
SAMPLE_FACTORY: Final = ("sample-factory==2.1.1",)
# Of the peers' environments, which are one copy each, in a worker.
_PEER_COPIES: Final = 16
_COPIES: Final = {"spread": 256, "leduc": 512}
_RUN_SECONDS: Final = 900.0


@dataclass(frozen=True)
class Rate:
    """What one side did."""

    steps: float
    wall: float
    cpu: float

    @property
    def per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.wall

    @property
    def per_cpu_second(self) -> float:
        """Steps per second of CPU, of all its processes."""
        return self.steps / self.cpu


def measured(
    python: str | Path, module: str, world: str, workers: int, copies: int, seconds: float
) -> Rate:
    """One side's window of time, in processes of its own."""
    arguments = [world, str(workers), str(copies), str(seconds)]
    with tempfile.TemporaryDirectory(prefix="sampling-") as directory:
        run = subprocess.run(
            [str(python), "-m", f"benchmarks.sampling.{module}", *arguments],
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            check=False,
            # Sample Factory writes where it is, and Ray's driver asks this for its temporary files.
            cwd=directory,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        )
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"steps"')]
    if not lines:
        raise SystemExit(f"{module} on {world} failed: {run.stderr.strip()[-800:]}")
    return Rate(**json.loads(lines[-1]))


def ratio(ours: Rate, theirs: Rate) -> float:
    """By the clock or by CPU seconds, whichever says less for us."""
    return min(ours.per_second / theirs.per_second, ours.per_cpu_second / theirs.per_cpu_second)


def row(world: str, side: str, workers: int, rate: Rate) -> str:
    """A line of the table."""
    return (
        f"{world:8} {side:28} {workers:>7} {rate.per_second:>12,.0f} {rate.per_cpu_second:>14,.0f}"
    )


def against_peers(lines: list[str], workers: int, seconds: float) -> dict[str, float]:
    """Both environments on all sides."""
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        try:
            rllib = reference_python(RLLIB, Path(directory) / "rllib", apart="rllib")
            factory = reference_python(SAMPLE_FACTORY, Path(directory) / "sf", apart="sf")
        except ReferenceUnavailable as error:
            raise SystemExit(str(error)) from None
        found: dict[str, float] = {}
        for world in ("spread", "leduc"):
            ours = measured(sys.executable, "ours", world, workers, _COPIES[world], seconds)
            lines.append(row(world, "Troupe", workers, ours))
            sides = [("RLlib", rllib, "rllib", world, _PEER_COPIES)]
            sides.append(("Sample Factory", factory, "samplefactory", world, _PEER_COPIES))
            if world == "spread":
                name = "Sample Factory, our arrays"
                arrays = (name, factory, "samplefactory", "spread_arrays", _COPIES[world])
                sides.append(arrays)
            for name, python, module, theirs, copies in sides:
                rate = measured(python, module, theirs, workers, copies, seconds)
                lines.append(row(world, name, workers, rate))
                key = f"over_{module}_{theirs}"
                found[key] = ratio(ours, rate)
    return found


def over_workers(lines: list[str], counts: Sequence[int], seconds: float) -> dict[str, float]:
    """Ours with more and more processes: the least of all rates against that of one per core."""
    stable = {}
    for world in ("spread", "leduc"):
        rates = []
        for workers in counts:
            rate = measured(sys.executable, "ours", world, workers, _COPIES[world], seconds)
            lines.append(row(world, "Troupe", workers, rate))
            rates.append(rate)
        enough = [one for one, n in zip(rates, counts, strict=True) if n >= cores()]
        least = min(one.per_second for one in enough)
        stable[f"stable_{world}"] = least / enough[0].per_second
        stable[f"stable_{world}_cpu"] = (
            min(one.per_cpu_second for one in rates) / rates[0].per_cpu_second
        )
    return stable


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all sides, print a table and the JSON object."""
    options = options_of(__doc__, arguments, parts=("peers", "workers"))
    workers = 1 if options.quick else cores()
    seconds = 2.0 if options.quick else 8.0
    counts = (1, 2) if options.quick else (1, 2, 4, 8, 16)
    header = f"{'steps/s':>12} {'steps/CPU s':>14}"
    lines = [f"{'world':8} {'side':28} {'workers':>7} {header}"]
    found: dict[str, Any] = {}
    if options.only != "workers":
        ratios = against_peers(lines, workers, seconds)
        found["over_rllib"] = min(v for k, v in ratios.items() if "_rllib_" in k)
        found["over_samplefactory"] = min(v for k, v in ratios.items() if "_samplefactory_" in k)
        found |= ratios
    if options.only != "peers":
        found |= over_workers(lines, counts, seconds)
    found = {name: round(value, 3) for name, value in found.items()}
    if not options.json:
        print("\n".join(lines), file=sys.stdout)
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
