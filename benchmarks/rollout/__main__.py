"""The cost of runner, router and gRPC in addition to the engine.

    python -m benchmarks.rollout [--quick] [--json] [--only PART]

One rollout service in its usual form, called over gRPC; the trajectories are evaluations, so that
no store is needed. The last line is one JSON object:

- `ratio_vs_engine`: tokens/s of the **real embedded engine** through the service over the same
  engine driven directly, in a separate process, at its best number of concurrent turns;
  alternating, medians.
- `turn_p50_ms`, `turn_p99_ms`: a workflow's wait for a turn beyond its model time, with 256
  concurrent trajectories on **simulated** engines, whose model time is known exactly.
- `rss_mib_2000`: resident memory of the service with 2,000 concurrent trajectories, each one
  conversation of several turns, on simulated engines: the process's memory without an engine.
- `turn_cpu_ms_short`, `turn_cpu_ms_long`: CPU of the service per turn, with a paced SGLang server
  in a separate process: short conversations, and prompts of 20,000 tokens with answers of 200. The
  same with `_busy`: without the process's idle CPU (`idle_cpu_ms_per_s`), which a fully loaded
  service divides by ten times as many turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, quantile, run_program
from benchmarks.rollout import served, turns
from benchmarks.rollout.workload import STEP_SECONDS, embedded, simulated


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    concurrency: tuple[int, ...]
    in_flight: int
    """Concurrent trajectories through the service: more than the engine runs, as in a job."""
    trajectories: int
    repeats: int
    latency_trajectories: int
    latency_in_flight: int
    crowd: int
    shapes: tuple[turns.TurnShape, ...]


FULL = Plan((32, 64, 96), 96, 144, 3, 768, 256, 2000, turns.SHAPES)
QUICK = Plan((16,), 16, 16, 1, 64, 32, 100, tuple(replace(s, trajectories=8) for s in turns.SHAPES))
PARTS = ("engine", "latency", "memory", "turns")


def directly(directory: Path, concurrency: Sequence[int], trajectories: int) -> dict[int, float]:
    """Return tokens per second of the engine alone."""
    command = [sys.executable, "-m", "benchmarks.rollout.direct", str(directory)]
    arguments = [str(trajectories), *map(str, concurrency)]
    done = subprocess.run(
        [*command, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=900
    )
    return {int(c): rate for c, rate in json.loads(done.stdout.splitlines()[-1]).items()}


async def throughput(directory: Path, plan: Plan, console: Console) -> tuple[float, float, int]:
    """Return median tokens/s through the service and directly, and the best number of concurrent
    turns."""
    rates = await asyncio.to_thread(directly, directory, plan.concurrency, plan.trajectories)
    best = max(rates, key=lambda c: rates[c])
    console.print(
        "engine alone: " + ", ".join(f"{r:,.0f} tokens/s at {c}" for c, r in rates.items())
    )
    alone, through = [rates[best]], list[float]()
    for number in range(plan.repeats):
        with served.service(directory) as (address, process):
            job = embedded(directory, plan.in_flight)
            async with served.prepared(address, directory, job) as stub:
                await served.run(stub, process, 900_000, plan.in_flight)  # warm
                # Numbers of five digits, as in `directly`, for prompts of one length.
                run = await served.run(stub, process, 10_000 + 1000 * number, plan.trajectories)
                through.append(run.tokens / run.seconds)
        if number + 1 < plan.repeats:
            again = await asyncio.to_thread(directly, directory, [best], plan.trajectories)
            alone.append(again[best])
    console.print(
        f"through the service: {', '.join(f'{r:,.0f}' for r in through)} tokens/s; "
        f"alone: {', '.join(f'{r:,.0f}' for r in alone)}"
    )
    return statistics.median(through), statistics.median(alone), best


async def latency(directory: Path, plan: Plan) -> served.Run:
    """Measure turns of a fully loaded service on simulated engines."""
    with served.service(directory) as (address, process):
        job = simulated(directory, "ask", plan.latency_in_flight, turns=4)
        async with served.prepared(address, directory, job) as stub:
            await served.run(stub, process, 900_000, plan.latency_in_flight // 4)  # warm
            return await served.run(stub, process, 0, plan.latency_trajectories)


async def crowd(directory: Path, plan: Plan) -> tuple[served.Run, int]:
    """Measure many concurrent conversations; also return the process's memory before them."""
    with served.service(directory) as (address, process):
        job = simulated(directory, "talk", plan.crowd, turns=6)
        async with served.prepared(address, directory, job) as stub:
            empty = process.memory_info().rss
            return await served.run(stub, process, 0, plan.crowd), empty


async def measure(
    directory: Path, plan: Plan, console: Console, only: str | None = None
) -> dict[str, float]:
    """Measure everything, or the part `only`; print results as they come."""
    table = Table(title="rollout: the path between a workflow and its engine")
    for heading in ("measured", "engine", "value"):
        table.add_column(heading)
    found: dict[str, float] = {}
    if only in (None, "engine"):
        through, alone, best = await throughput(directory, plan, console)
        found["ratio_vs_engine"] = round(through / alone, 3)
        at_once = f"embedded, {best} turns at once"
        table.add_row("tokens/s, engine alone at its best", at_once, f"{alone:,.0f}")
        table.add_row(
            "tokens/s through runner, router, gRPC",
            f"embedded, {plan.in_flight} trajectories",
            f"{through:,.0f} ({through / alone:.2f} x)",
        )
    if only in (None, "latency"):
        run = await latency(directory, plan)
        p50, p99 = (quantile(run.added, q) * 1e3 for q in (0.5, 0.99))
        found |= {"turn_p50_ms": round(p50, 2), "turn_p99_ms": round(p99, 2)}
        rate = run.turns / run.seconds
        table.add_row(
            f"added latency per turn, {run.most_in_flight} trajectories",
            f"simulated, {STEP_SECONDS * 1e3:.0f} ms a token; {rate:.0f} turns/s",
            f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        )
        cpu = f"{run.cpu_seconds / run.turns * 1e3:.2f} ms"
        table.add_row("CPU of service and engines per turn", "simulated", cpu)
    if only in (None, "memory"):
        many, empty = await crowd(directory, plan)
        rss = many.most_rss / 2**20
        found |= {"rss_mib_2000": round(rss, 1), "in_flight": many.most_in_flight}
        table.add_row(
            f"memory with {many.most_in_flight} conversations",
            "simulated",
            f"{rss:.0f} MiB ({empty / 2**20:.0f} before)",
        )
    for shape in plan.shapes if only in (None, "turns") else ():
        cost = await turns.cost_of(directory, shape)
        found |= {
            f"turn_cpu_ms_{shape.name}": round(cost.cpu_ms, 2),
            f"turn_cpu_ms_{shape.name}_busy": round(cost.busy_cpu_ms, 2),
            "idle_cpu_ms_per_s": round(cost.idle * 1e3, 1),
        }
        table.add_row(
            f"CPU of the service per turn, {cost.prompt:,.0f} + {shape.answer} tokens",
            f"SGLang, paced; {cost.turns / cost.seconds:.0f} turns/s",
            f"{cost.cpu_ms:.2f} ms, {cost.busy_cpu_ms:.2f} without {cost.idle * 1e3:.0f} ms/s idle",
        )
    console.print(table)
    load = os.getloadavg()[0]
    console.print(f"{os.cpu_count()} cores, load {load:.1f} at the end")
    return {**found, "load": round(load, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = options_of(__doc__, arguments, parts=PARTS)
    console = Console(quiet=options.json, width=130)
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory:
        plan = QUICK if options.quick else FULL
        results = asyncio.run(measure(Path(directory), plan, console, options.only))
    finish(results, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
