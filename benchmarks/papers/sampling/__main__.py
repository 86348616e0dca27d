"""Environment steps per second of small networks, against RLlib's and Sample Factory's.

    python -m benchmarks.papers.sampling [--quick] [--json] [--only peers|workers]

MPE's simple_spread (three agents, 25 steps) and Leduc poker against uniformly random play, networks
of two hidden layers of 64, as many worker processes as cores on every side, each side in its own
Python, short alternating windows. Only steps that have reached the driver count. Sampling alone,
without training. Takes three to four minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from benchmarks.command import finish, options_of, progress, run_program
from benchmarks.papers.sampling.sides import Rate, Side, SideFailed, ratio, started
from benchmarks.references import ReferenceUnavailable, reference_python

T = TypeVar("T")
RLLIB: Final = ("ray[rllib]==2.60.0",)
SAMPLE_FACTORY: Final = ("sample-factory==2.1.1",)
# Copies in a worker of the peers' environments, which are one copy each.
_PEER_COPIES: Final = 16
_COPIES: Final = {"spread": 256, "leduc": 512}
# Copies of the same arrays on both sides.
_ARRAYS: Final = (256, 512)
_WORLDS: Final = ("spread", "leduc")


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    workers: int
    counts: tuple[int, ...]
    """Troupe's numbers of worker processes, ascending."""
    seconds: float
    """Seconds of a window."""
    rounds: int


def row(side: Side, workers: int, rates: Sequence[Rate]) -> str:
    """Return a line of the table: medians of all rounds."""
    per_second = median(rate.per_second for rate in rates)
    per_cpu = median(rate.per_cpu_second for rate in rates)
    told = f"{side.world.removesuffix('_arrays'):8} {side.name:28} {workers:>7} {side.copies:>6}"
    return f"{told} {per_second:>12,.0f} {per_cpu:>14,.0f}"


def turn(what: Sequence[T], number: int) -> list[T]:
    """Return the order of round `number`, in which another side begins each time, since the order
    may matter."""
    first = number % len(what)
    return [*what[first:], *what[:first]]


def compared(sides: Sequence[Side], plan: Plan, lines: list[str]) -> list[list[Rate]]:
    """Measure alternating windows of all sides, in orders in which each side begins equally
    often."""
    progress(f"{', '.join(side.name for side in sides)}: {sides[0].world}")
    found: list[list[Rate]] = [[] for _ in sides]
    with started(sides) as running:
        for number in range(plan.rounds):
            for rates, one in turn(list(zip(found, running, strict=True)), number):
                rates.append(one.window(plan.seconds))
    lines += [row(side, side.workers, rates) for side, rates in zip(sides, found, strict=True)]
    return found


def own(world: str, workers: int, copies: int) -> Side:
    """Return Troupe's side."""
    return Side("Troupe", sys.executable, "ours", world, workers, copies)


def against_peers(lines: list[str], plan: Plan) -> dict[str, float]:
    """Measure both environments on all sides in their usual form, and one with the same arrays."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        rllib = reference_python(RLLIB, Path(directory) / "rllib", apart="rllib")
        factory = reference_python(SAMPLE_FACTORY, Path(directory) / "sf", apart="sf")
        for world in _WORLDS:
            sides = [
                own(world, plan.workers, _COPIES[world]),
                Side("RLlib", rllib, "rllib", world, plan.workers, _PEER_COPIES),
                Side("Sample Factory", factory, "samplefactory", world, plan.workers, _PEER_COPIES),
            ]
            ours, *theirs = compared(sides, plan, lines)
            for side, rates in zip(sides[1:], theirs, strict=True):
                found[f"over_{side.module}_{world}"] = ratio(ours, rates)
        for copies in _ARRAYS:
            name = "Sample Factory, our arrays"
            same = Side(name, factory, "samplefactory", "spread_arrays", plan.workers, copies)
            ours, rates = compared([own("spread", plan.workers, copies), same], plan, lines)
            found[f"over_samplefactory_arrays_{copies}"] = ratio(ours, rates)
    return found


def over_workers(lines: list[str], plan: Plan) -> dict[str, float]:
    """Measure Troupe with more and more processes: the lowest rate over the rate of one process per
    core, and the lowest rate per CPU second over the rate of one process."""
    stable = {}
    for world in _WORLDS:
        side = own(world, plan.counts[-1], _COPIES[world])
        progress(f"Troupe, {plan.counts[0]} to {plan.counts[-1]} workers: {world}")
        rates: dict[int, list[Rate]] = {workers: [] for workers in plan.counts}
        with started([side]) as [running]:
            for number in range(plan.rounds):
                for workers in turn(plan.counts, number):
                    rates[workers].append(running.window(plan.seconds, workers))
        lines += [row(side, workers, some) for workers, some in rates.items()]
        clock = {n: median(one.per_second for one in some) for n, some in rates.items()}
        cpu = {n: median(one.per_cpu_second for one in some) for n, some in rates.items()}
        enough = [n for n in plan.counts if n >= cores()] or [plan.counts[-1]]
        stable[f"stable_{world}"] = min(clock[n] for n in enough) / clock[enough[0]]
        stable[f"stable_{world}_cpu"] = min(cpu.values()) / cpu[plan.counts[0]]
    return stable


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all sides, print a table and the JSON object."""
    options = options_of(__doc__, arguments, parts=("peers", "workers"))
    plan = Plan(cores(), (1, 2, 4, 8, 16), 1.5, 3)
    if options.quick:
        plan = Plan(1, (1, 2), 0.5, 1)
    header = f"{'copies':>6} {'steps/s':>12} {'steps/CPU s':>14}"
    lines = [f"{'world':8} {'side':28} {'workers':>7} {header}"]
    found: dict[str, Any] = {}
    try:
        if options.only != "workers":
            ratios = against_peers(lines, plan)
            for peer in ("rllib", "samplefactory"):
                found[f"over_{peer}"] = min(v for k, v in ratios.items() if f"_{peer}_" in k)
            found |= ratios
        if options.only != "peers":
            found |= over_workers(lines, plan)
    except (ReferenceUnavailable, SideFailed) as error:
        raise SystemExit(str(error)) from None
    found = {name: round(value, 3) for name, value in found.items()}
    if not options.json:
        print("\n".join(lines))
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
