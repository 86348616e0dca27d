"""One policy's whole job through all services, against TRL's GRPOTrainer.

    python -m benchmarks.end_to_end [--quick] [--json] [--rounds N] [--steps N] [--dtype T]

The same tasks, reward, weights (a Qwen3 of 3.2 million parameters) and settings; 256 samples of 16
tokens per step, and this machine's cores for both. Matrix products use the type that is faster on
this machine: bfloat16 by autocast over float32 weights, TRL's own default, or float32.

Every round runs in order: TRL alone with a thread per core; Troupe's jobs on clusters that stay up
(one policy on policy, two at once, one in mode `async`); TRL alone again; and two instances of TRL
with one thread each. Rates are from the median step after warm-up; TRL's is the mean of before and
after, so that changes of the machine's speed during a round affect both. Ratios are medians over
rounds. TRL is installed separately (benchmarks/references.py).

The last line is one JSON object:

- `over_trl`: samples/s of the on-policy job over TRL's.
- `two_policies_over_trl_twice`: samples/s of two policies in one job over two TRL runs one after
  the other. Over two concurrent TRL runs: `two_policies_over_trl_beside`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.end_to_end.trl_process import Trl
from benchmarks.end_to_end.troupe_side import cluster, job, run
from benchmarks.end_to_end.workload import (
    DTYPES,
    LARGE,
    SMALL,
    Size,
    Work,
    faster_dtype,
    save_model,
)
from benchmarks.references import TRL, reference_python

# Warm-up steps of a job, which start engines and fill caches.
WARM: Final = 2
ROWS: Final = {
    "trl": "TRL, a thread per core",
    "trl_beside": "TRL twice at once, half the cores each",
    "one": "Troupe, one policy, on policy",
    "one_async": "Troupe, one policy, async, alpha 1",
    "two": "Troupe, two policies, on policy",
}


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    size: Size
    work: Work
    steps: int
    rounds: int


# The rate is so small that the weights hardly move: every round measures the same work.
FULL: Final = Plan(LARGE, Work(steps=0, lr=1e-6), steps=8, rounds=3)
QUICK: Final = Plan(SMALL, Work(steps=0, lr=1e-6, queries=4), steps=2, rounds=1)


async def measure(directory: Path, plan: Plan, console: Console) -> dict[str, list[float]]:
    """Return samples/s of each row, round by round."""
    python = reference_python([TRL], directory / "reference")
    model = save_model(directory / "model", plan.size, 0)
    cores = os.cpu_count() or 1
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    with (
        Trl(python, model, plan.work, threads=cores, steps=plan.steps) as alone,
        Trl(python, model, plan.work, threads=max(1, cores // 2), steps=plan.steps) as left,
        Trl(python, model, plan.work, threads=max(1, cores // 2), steps=plan.steps) as right,
    ):
        async with (
            # On policy, rollout and training of one policy alternate; otherwise they run
            # concurrently.
            cluster(directory / "turns", threads=1, trainer_threads=cores) as turns,
            cluster(directory / "beside", threads=1, trainers=2) as side_by_side,
        ):
            for trl in (alone, left, right):
                await asyncio.to_thread(trl.round)  # warm
            for number in range(plan.rounds):
                before = await asyncio.to_thread(alone.round)
                # Waves help only if nothing else uses the cores while turns are drawn.
                for name, client, policies, waves, mode in (
                    ("one", turns, 1, 2, "micro_batch"),
                    ("two", side_by_side, 2, 1, "micro_batch"),
                    ("one_async", side_by_side, 1, 1, "async"),
                ):
                    work = plan.work.lasting(WARM + plan.steps)
                    models = [model] * policies
                    title = f"end-{number}-{name}".replace("_", "-")
                    spec = job(title, models, work, waves=waves, mode=mode)
                    ends = [step.at for step in await run(client, spec)]
                    seconds = statistics.median(b - a for a, b in pairwise(ends[WARM - 1 :]))
                    found[name].append(policies * work.samples / seconds)
                after = await asyncio.to_thread(alone.round)
                found["trl"].append((before + after) / 2)
                beside = (asyncio.to_thread(trl.round) for trl in (left, right))
                found["trl_beside"].append(sum(await asyncio.gather(*beside)))
                told = ", ".join(f"{name} {rates[-1]:.0f}" for name, rates in found.items())
                console.print(f"round {number + 1}, samples/s: {told}")
    return found


def ratios(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return the JSON object: medians of the rounds' ratios and rates."""

    def over(ours: str, theirs: str) -> float:
        pairs = zip(found[ours], found[theirs], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "over_trl": over("one", "trl"),
        "two_policies_over_trl_twice": over("two", "trl"),
        "two_policies_over_trl_beside": over("two", "trl_beside"),
        "async_over_trl": over("one_async", "trl"),
        "samples_per_second": {
            name: round(statistics.median(rates), 1) for name, rates in found.items()
        },
        "rounds": {name: [round(rate, 1) for rate in rates] for name, rates in found.items()},
        "load": round(os.getloadavg()[0], 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps per round and row")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of products; default: the faster one here"
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json, width=130)
    base = QUICK if options.quick else FULL
    work = replace(base.work, dtype=options.dtype or faster_dtype(base.size))
    plan = Plan(base.size, work, options.steps or base.steps, options.rounds or base.rounds)
    with scratch() as directory:
        rates = asyncio.run(measure(directory, plan, console))
    found = {**ratios(rates), "dtype": work.dtype}
    table = Table(title=f"The whole job: 256 samples of 16 tokens per step, {work.dtype}")
    for heading in ("", "samples/s", "of TRL's"):
        table.add_column(heading, justify="left" if not heading else "right")
    base_rate = found["samples_per_second"]["trl"]
    for name, label in ROWS.items():
        rate = found["samples_per_second"][name]
        table.add_row(label, f"{rate:.0f}", f"{rate / base_rate:.2f}")
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load {found['load']} at the end")
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
