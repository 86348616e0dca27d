"""The gain from routing turns to the devices that suit them (RollArt's hardware affinity).

    python -m benchmarks.papers.affinity [--quick] [--json]

Half games with mostly prefill and half proofs with mostly decoding, by one policy with four
**simulated** engines in a real rollout service: all of one class or the other, then two of each. An
engine of either class stands for devices of the same price: `compute` prefills 2.5 times as fast,
`bandwidth` decodes twice as fast. Seconds until all trajectories have ended, row after row in one
run. The last line is one JSON object; all ratios are over the better single class:

- `affinity_over_one_class`: two of each, with declared classes of the domains.
- `inferred_over_one_class`: two of each, with classes inferred by the router.
- `mixed_over_one_class`: two of each, routed by least work only.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, run_program
from benchmarks.rollout import served
from benchmarks.rollout.workload import POLICY, spec
from troupe.job import JobSpec

ENGINES: Final = 4
MAX_RUNNING: Final = 64
SIMULATED: Final[dict[str, Any]] = {
    "decode_seconds": 0.016,
    "decode_seconds_per_turn": 0.0001,
    "prefill_tokens_per_second": 60_000,
    "response_tokens_mean": 300,
    "response_tokens_sigma": 0.4,
    "load_seconds": 0.0,
    "classes": {
        "compute": {},
        "bandwidth": {
            "prefill_tokens_per_second": 24_000,
            "decode_seconds": 0.008,
            "decode_seconds_per_turn": 0.00005,
        },
    },
}
OFF: Final[dict[str, Any]] = {"infer": False}
DECLARED: Final[dict[str, Any]] = {
    "infer": False,
    "domains": {"game": "compute", "proof": "bandwidth"},
}


@dataclass(frozen=True)
class Row:
    """A set of engines and its routing."""

    name: str
    pools: dict[str, int]
    affinity: dict[str, Any]


ROWS: Final = (
    Row("compute", {"compute": ENGINES}, OFF),
    Row("bandwidth", {"bandwidth": ENGINES}, OFF),
    Row("mixed", {"compute": ENGINES // 2, "bandwidth": ENGINES // 2}, OFF),
    Row("inferred", {"compute": ENGINES // 2, "bandwidth": ENGINES // 2}, {"infer": True}),
    Row("affinity", {"compute": ENGINES // 2, "bandwidth": ENGINES // 2}, DECLARED),
)


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    trajectories: int
    in_flight: int
    repeats: int


FULL = Plan(288, 96, 1)
QUICK = Plan(24, 24, 1)


def job(directory: Path, row: Row, plan: Plan) -> JobSpec:
    """Return the job of a row."""
    pools = [{"device_class": name, "replicas": count} for name, count in row.pools.items()]
    engine = {"pools": pools, "max_running": MAX_RUNNING, "max_context": 4096}
    return spec(
        directory,
        "play",
        {"engine": engine, "simulated": SIMULATED},
        module="benchmarks.papers.affinity.mixed_domains",
        max_new_tokens=1200,
        limits={"max_concurrent_trajectories": plan.in_flight},
        routing={"affinity": row.affinity},
    )


async def measure(directory: Path, plan: Plan, console: Console) -> dict[str, float]:
    """Measure every row, and print a table."""
    seconds: dict[str, list[float]] = {row.name: [] for row in ROWS}
    for _ in range(plan.repeats):
        for row in ROWS:
            with served.service(directory) as (address, process):
                asked = job(directory, row, plan)
                async with served.prepared(address, directory, asked) as stub:
                    run = await served.run(stub, process, 0, plan.trajectories)
            seconds[row.name].append(run.seconds)
    taken = {name: statistics.median(values) for name, values in seconds.items()}
    single = min(taken["compute"], taken["bandwidth"])
    table = Table(
        title=f"{plan.trajectories} trajectories, {plan.in_flight} at once, {ENGINES} engines "
        f"of policy '{POLICY}' (simulated)"
    )
    for heading in ("engines", "turns go to", "seconds", "over one class"):
        table.add_column(heading)
    rule = {"inferred": "the class inferred", "affinity": "the class declared"}
    for row in ROWS:
        table.add_row(
            ", ".join(f"{count} {name}" for name, count in row.pools.items()),
            rule.get(row.name, "the least work"),
            f"{taken[row.name]:.1f}",
            f"{single / taken[row.name]:.2f}",
        )
    console.print(table)
    return {
        f"{name}_over_one_class": round(single / taken[name], 3)
        for name in ("affinity", "inferred", "mixed")
    } | {f"{name}_s": round(value, 2) for name, value in taken.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = options_of(__doc__, arguments)
    console = Console(quiet=options.json, width=110)
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory:
        results = asyncio.run(measure(Path(directory), QUICK if options.quick else FULL, console))
    finish(results, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
