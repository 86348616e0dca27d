"""Rewards as functions that scale from zero, against a permanent pool.

    python -m benchmarks.papers.serverless [--quick] [--json]

A real reward service in a separate process; the client is this process. The last line is one JSON
object:

- `utilization`: seconds of running functions over seconds of existing worker processes, for 10,000
  calls in bursts, with workers that are started for a burst and ended after it. The start of a
  worker counts as provisioned time, not as running time.
- `dedicated_utilization`: the same for a pool that always has as many workers. Both get the same
  bursts at the same intervals, each while the other is idle.
- `throughput`: calls per second during a burst, autoscaled; `dedicated_throughput`: of the
  dedicated pool.
- `overhead_p50_ms`: from sending a call of an empty function to its result; one warm worker, one
  call at a time. `batched_overhead_p50_ms`: the same per call in batches of 100.
- `cold_start_p50_ms`, `cold_start_p99_ms`: a call's wait for a new worker process, until that has
  imported the function.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, quantile, run_program, scratch
from benchmarks.papers.serverless.service import Service, started
from troupe.v1 import reward_pb2 as reward_pb

BATCH = 100


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    singles: int
    batches: int
    cold_starts: int
    bursts: int
    calls_per_burst: int
    workers: int
    mean_seconds: float
    """Mean seconds of a call, drawn from an exponential distribution, at most five times the
    mean."""
    distance_seconds: float
    """Seconds from the start of a burst to the start of the next."""
    idle_seconds: float = 0.1
    """Seconds after which an idle worker is ended."""

    @property
    def calls(self) -> int:
        """Calls of all bursts."""
        return self.bursts * self.calls_per_burst


FULL = Plan(2000, 60, 60, 5, 2000, 8, 0.016, 56.0)
QUICK = Plan(50, 2, 3, 2, 60, 3, 0.01, 3.0)


@dataclass
class Pool:
    """The figures of one pool over all bursts."""

    run_seconds: float = 0.0
    burst_seconds: float = 0.0
    provisioned_seconds: float = 0.0
    most_workers: int = 0
    workers_between: int = 0

    @property
    def utilization(self) -> float:
        """Fraction of its workers' lifetime in which functions ran."""
        return self.run_seconds / self.provisioned_seconds


async def overhead(directory: Path, plan: Plan) -> tuple[list[float], list[float]]:
    """Return the seconds of single calls, and per call of batches."""
    async with started(directory, "warm", workers=1, min_workers=1) as service:
        await service.register("nothing")
        for _ in range(20):
            await service.invoke("nothing")
        singles, batches = [], []
        for i in range(plan.singles):
            start = time.perf_counter()
            await service.invoke("nothing", f'{{"x": {i}}}')
            singles.append(time.perf_counter() - start)
        arguments = [f'{{"x": {i}}}' for i in range(BATCH)]
        for _ in range(plan.batches):
            start = time.perf_counter()
            await service.batch("nothing", arguments)
            batches.append((time.perf_counter() - start) / BATCH)
        return singles, batches


async def cold_starts(directory: Path, plan: Plan) -> list[float]:
    """Return the seconds that calls waited for a new worker."""
    async with started(directory, "cold", workers=1, min_workers=0, idle_seconds=0) as service:
        await service.register("nothing")
        found = []
        for _ in range(plan.cold_starts):
            response = await service.invoke("nothing")
            found.append(response.cold_start_seconds)
            await service.is_empty()
        return found


async def bursts(directory: Path, plan: Plan) -> tuple[Pool, Pool]:
    """Measure the autoscaled pool and the dedicated one alternately."""
    draw = random.Random(7)
    durations = [
        [
            min(5 * plan.mean_seconds, draw.expovariate(1 / plan.mean_seconds))
            for _ in range(plan.calls_per_burst)
        ]
        for _ in range(plan.bursts)
    ]
    scaled = {"workers": plan.workers, "min_workers": 0, "idle_seconds": plan.idle_seconds}
    fixed = {"workers": plan.workers, "min_workers": plan.workers, "idle_seconds": 3600}
    autoscaled, dedicated = Pool(), Pool()
    async with (
        started(directory, "autoscaled", **scaled) as one,
        started(directory, "dedicated", **fixed) as other,
    ):
        for service in (one, other):
            await service.register("waits")
        # A dedicated pool is warm before its first burst.
        await other.batch("waits", ['{"seconds": 0.05}'] * plan.workers)
        begun = time.perf_counter()
        before = [await service.pool() for service in (one, other)]
        for i, burst in enumerate(durations):
            for j, (service, pool) in enumerate(((one, autoscaled), (other, dedicated))):
                at = begun + (i + j / 2) * plan.distance_seconds
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                idle = await service.pool()
                pool.workers_between = max(pool.workers_between, idle.workers)
                await _burst(service, burst, pool)
        last = begun + plan.bursts * plan.distance_seconds
        await asyncio.sleep(max(0.0, last - time.perf_counter()))
        for service, pool, status in zip(
            (one, other), (autoscaled, dedicated), before, strict=True
        ):
            now = await service.pool()
            pool.provisioned_seconds = now.provisioned_seconds - status.provisioned_seconds
    return autoscaled, dedicated


async def _burst(service: Service, durations: Sequence[float], pool: Pool) -> None:
    arguments = [json.dumps({"seconds": seconds}) for seconds in durations]
    start = time.perf_counter()
    answers = asyncio.gather(
        *(service.batch("waits", arguments[i : i + BATCH]) for i in range(0, len(arguments), BATCH))
    )
    while not answers.done():
        await asyncio.wait([answers], timeout=0.25)
        pool.most_workers = max(pool.most_workers, (await service.pool()).workers)
    responses = [response for batch in answers.result() for response in batch]
    pool.burst_seconds += time.perf_counter() - start
    pool.run_seconds += sum(_ran(response) for response in responses)


def _ran(response: reward_pb.InvokeResponse) -> float:
    return response.run_seconds - response.cold_start_seconds


async def measure(plan: Plan, console: Console) -> dict[str, float]:
    """Measure everything; print tables to `console`."""
    with scratch() as directory:
        singles, batches = await overhead(directory, plan)
        cold = await cold_starts(directory, plan)
        autoscaled, dedicated = await bursts(directory, plan)
    table = Table("milliseconds", "p50", "p99")
    for name, values in (
        ("one call, warm", singles),
        (f"a call of {BATCH}, warm", batches),
        ("cold start", cold),
    ):
        table.add_row(name, *(f"{1000 * quantile(values, q):.2f}" for q in (0.5, 0.99)))
    console.print(table)
    columns = ("pool", "workers", "between bursts", "worker-seconds", "of them used", "calls/s")
    table = Table(*columns, title=f"{plan.calls:,} calls in {plan.bursts} bursts")
    for name, pool in (("autoscaled", autoscaled), ("dedicated", dedicated)):
        table.add_row(
            name,
            str(pool.most_workers),
            str(pool.workers_between),
            f"{pool.provisioned_seconds:.1f}",
            f"{pool.utilization:.1%}",
            f"{plan.calls / pool.burst_seconds:.0f}",
        )
    console.print(table)
    return {
        "utilization": round(autoscaled.utilization, 3),
        "dedicated_utilization": round(dedicated.utilization, 3),
        "overhead_p50_ms": round(1000 * statistics.median(singles), 3),
        "batched_overhead_p50_ms": round(1000 * statistics.median(batches), 3),
        "cold_start_p50_ms": round(1000 * statistics.median(cold), 1),
        "cold_start_p99_ms": round(1000 * quantile(cold, 0.99), 1),
        "throughput": round(plan.calls / autoscaled.burst_seconds),
        "dedicated_throughput": round(plan.calls / dedicated.burst_seconds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = options_of(__doc__, arguments)
    console = Console(quiet=options.json)
    found = asyncio.run(measure(QUICK if options.quick else FULL, console))
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
