"""`python -m benchmarks.planner [--quick] [--json] [--only engines|trainers]`

Is the planner's split the best one? All splits of a few devices, live and planned.

Devices are simulated: engines and trainers are real processes that take the time of cost models. A
split gives each of two policies some engines, and the remaining devices to trainer workers. The
planner gets the profile of one live run, not the cost models' lengths.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, run_program
from benchmarks.papers.pipeline.measure import step_ends
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.devices import parse_devices
from troupe.job import JobSpec
from troupe.twin.planner import JobPlan, Prediction
from troupe.twin.plans import planned
from troupe.twin.profile import JobProfile

DEVICES: Final = 6
STEPS: Final = 3
_ROW_SECONDS: Final = 300.0
_ENGINE: Final = {
    "prefill_tokens_per_second": 40_000.0,
    "decode_seconds": 0.02,
    "decode_seconds_per_turn": 0.001,
    "response_tokens_mean": 40.0,
    "response_tokens_sigma": 0.5,
    "step_seconds": 0.05,
    "load_seconds": 0.02,
}
# Tokens per second of a trainer, by the component that a step waits for.
WORKLOADS: Final = {"engines": 20_000.0, "trainers": 1_500.0}

Split = tuple[int, int, int]


class Queries:
    """Tasks with one to three rounds."""

    def __init__(self, split: str) -> None:
        self._split = split

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "rounds": 1 + index % 3}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Let a solver and a checker speak alternately."""
    for number in range(query["rounds"]):
        for name in ("solver", "checker"):
            text = f"Task {query['index']}, round {number}: what does the {name} say?"
            await agents[name].chat([{"role": "user", "content": text}])
    return {"solver": float(query["index"] % 2), "checker": 0.5}


def splits() -> list[Split]:
    """Return all splits (engines of both policies, trainers) with at least one device each."""
    every = itertools.product(range(1, DEVICES), repeat=2)
    return [(a, b, DEVICES - a - b) for a, b in every if a + b < DEVICES]


def job(workload: str, split: Split, directory: Path) -> JobSpec:
    """Return the job of a workload with a split's engines."""
    vocabulary = save_tokenizer(directory / "tokenizer", ends=False)
    model = {
        "config": {"model_type": "qwen3", "vocab_size": vocabulary},
        "tokenizer": str(directory / "tokenizer"),
    }
    pace = _ENGINE | {"backward_tokens_per_second": WORKLOADS[workload]}
    small = pace | {"decode_seconds": 0.01, "decode_seconds_per_turn": 0.0005}
    agent = {"sampling": {"max_new_tokens": 120}}
    return JobSpec.model_validate(
        {
            "name": f"regret-{workload}-" + "-".join(map(str, split)),
            "workflow": "benchmarks.planner:play",
            "tasks": {"source": "benchmarks.planner:Queries"},
            "agents": {name: agent | {"policy": name} for name in ("solver", "checker")},
            "policies": {
                name: {
                    "model": model,
                    "engine": {"max_running": 8, "max_context": 1024, "replicas": engines},
                    "simulated": own,
                }
                for name, engines, own in (
                    ("solver", split[0], pace),
                    ("checker", split[1], small),
                )
            },
            "pipeline": {
                "steps": STEPS,
                "queries_per_step": 9,
                "group_size": 4,
                "micro_batch_samples": 8,
                "mode": "micro_batch",
            },
            "evaluation": {"queries": 0},
            "limits": {"max_concurrent_trajectories": 36},
            "logging": {"tensorboard": False},
        }
    )


async def _live(workload: str, directory: Path) -> tuple[dict[Split, float], JobProfile]:
    """Return the mean seconds of a step, without the first, for every split, and a profile."""
    found: dict[Split, float] = {}
    profile: JobProfile | None = None
    by_trainers: dict[int, list[Split]] = {}
    for split in splits():
        by_trainers.setdefault(split[2], []).append(split)
    for trainers, group in by_trainers.items():
        settings = ClusterSettings(
            data_dir=directory / f"data{trainers}", trainers=trainers, panel=False
        )
        async with (
            EmbeddedCluster(settings) as running,
            AsyncClient(running.state.orchestrator_address) as client,
        ):
            for split in group:
                found[split], own = await _run(client, job(workload, split, directory))
                profile = profile or own
                print(workload, split, f"{found[split]:.2f} s", file=sys.stderr, flush=True)
    assert profile is not None
    return found, profile


async def _run(client: AsyncClient, spec: JobSpec) -> tuple[float, JobProfile]:
    handle = await client.submit(spec)
    async with asyncio.timeout(_ROW_SECONDS):
        steps = await step_ends(handle)
    await handle.result(timeout=_ROW_SECONDS)
    measured = [one.values[metric_names.STEP_SECONDS] for one in steps[1:]]
    return sum(measured) / len(measured), await handle.profile()


def plan_of(workload: str, profile: JobProfile, directory: Path) -> JobPlan:
    """Return the plan of the job, from a profile of any of its runs."""
    spec = job(workload, (1, 1, 1), directory)
    return planned(
        spec,
        parse_devices(f"{DEVICES}xSimulated-8GB"),
        profile=profile,
        tflops=1.0,
        gigabytes_per_second=1.0,
    )


def _split_of(one: Prediction) -> Split:
    policies = one.split.policies
    return policies["solver"].engines, policies["checker"].engines, one.split.devices[1]


def regret(workload: str, console: Console) -> tuple[float, float]:
    """Return the fraction by which the recommended split's live steps are longer than the best
    split's, and the largest error of the predicted seconds."""
    with tempfile.TemporaryDirectory(prefix="troupe-planner-") as name:
        live, profile = asyncio.run(_live(workload, Path(name)))
        plan = plan_of(workload, profile, Path(name))
    predicted = {_split_of(one): one.means.seconds for one in (plan.best, *plan.others)}
    best, chosen = min(live.values()), _split_of(plan.best)
    table = Table(title=f"A step waits for {workload}: seconds per step")
    for column in ("solver, checker, trainers", "live", "planned", "error"):
        table.add_column(column, justify="right")
    errors = []
    for split, seconds in sorted(live.items(), key=lambda one: one[1]):
        name = ", ".join(map(str, split)) + (" (recommended)" if split == chosen else "")
        if (told := predicted.get(split)) is None:
            table.add_row(name, f"{seconds:.2f}", "not tried", "")
            continue
        errors.append(told / seconds - 1)
        table.add_row(name, f"{seconds:.2f}", f"{told:.2f}", f"{errors[-1]:+.1%}")
    console.print(table)
    return live[chosen] / best - 1, max(map(abs, errors))


def main() -> None:
    """Run the requested workloads."""
    args = options_of(__doc__, None, parts=tuple(WORKLOADS))
    console = Console(stderr=args.json, width=None if args.json else 120)
    names = [args.only] if args.only else list(WORKLOADS)[: 1 if args.quick else None]
    found = [regret(name, console) for name in names]
    worst = {"regret": max(one for one, _ in found), "prediction_error": max(e for _, e in found)}
    finish({name: round(value, 4) for name, value in worst.items()}, quiet=args.json)


if __name__ == "__main__":
    run_program(main)
