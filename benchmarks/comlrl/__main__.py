"""A team of two policies, against CoMLRL's MAGRPOTrainer: speed, CPU, memory, start, learning.

    python -m benchmarks.comlrl [--quick] [--json] [--windows N] [--steps N] [--seeds N]

Two agents with their own weights (two Qwen3 of 0.36 million parameters), 32 queries of 8 samples of
16 tokens for each, one joint reward, one update of each policy per step. CoMLRL is installed in an
environment of its own (benchmarks/references.py), with this environment's torch and transformers.

A window is a fresh process that trains a few steps: `troupe up` and a job, or CoMLRL. Windows
alternate: Troupe, CoMLRL with the same sampling and batches, CoMLRL with its own defaults (`top_p`
0.6, an update after every second query). Rates are from the median step after warm-up. CPU counts
all processes of the window between the end of the warm-up and the end of the last step, memory is
their largest proportional set size (PSS), and the first step counts from the launch. Then both
sides train from the same weights for each seed, as many samples on either side.

The last line is one JSON object. Ratios are medians over windows:

- `samples_ratio`: Troupe's samples/s over CoMLRL's, `cpu_ratio`: Troupe's CPU seconds per sample
  over CoMLRL's, `memory_ratio` and `first_step_ratio` likewise; below 1, Troupe takes less.
- `learning_equal`: no significant difference of the mean reward of the last steps (Welch's t-test,
  two-sided, 5 %).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.comlrl.workload import AGENTS, FULL, MODEL
from benchmarks.command import end, finish, progress, run_program, scratch
from benchmarks.end_to_end.troupe_side import job
from benchmarks.end_to_end.workload import SMALL, Size, Work, save_model
from benchmarks.parity import compare
from benchmarks.references import peer_environment, reference_python
from benchmarks.startup import cluster, looking, usage_of, wait_ready
from troupe.client import AsyncClient, MetricsLogged
from troupe.contracts import metric_names
from troupe.job import JobSpec

COMLRL: Final = "comlrl==1.4.3"
# Steps before the measured ones.
WARM: Final = 2
ROWS: Final = {
    "troupe": "Troupe",
    "comlrl": "CoMLRL, same sampling and batches",
    "comlrl_defaults": "CoMLRL, its defaults",
}
_RUN_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    size: Size
    work: Work
    steps: int
    windows: int
    seeds: int


PLANS: Final = {
    False: Plan(MODEL, FULL, steps=8, windows=6, seeds=3),
    True: Plan(SMALL, replace(FULL, queries=4, steps=3), steps=2, windows=1, seeds=2),
}


@dataclass
class Window:
    """Measurements of one fresh process, or of a tree of them."""

    launched: float
    pid: int
    samples: int
    """Of a step."""
    ends: list[float]
    rewards: list[float]
    cpu_warm: float = 0.0
    cpu: float = 0.0
    memory_mib: float = 0.0

    def step(self, reward: float) -> None:
        """Note the end of a step."""
        self.ends.append(time.monotonic())
        self.rewards.append(reward)
        self.look()

    def look(self) -> None:
        """Note what the processes have used until now."""
        usage = usage_of(self.pid)
        self.cpu = usage.cpu_seconds
        self.memory_mib = max(self.memory_mib, usage.memory_mib)
        if len(self.ends) <= WARM:
            self.cpu_warm = usage.cpu_seconds

    @property
    def figures(self) -> dict[str, float]:
        """The four figures of the window."""
        measured = self.ends[WARM - 1 :]
        seconds = statistics.median(b - a for a, b in pairwise(measured))
        return {
            "samples_per_second": self.samples / seconds,
            "cpu_ms_per_sample": 1000
            * (self.cpu - self.cpu_warm)
            / (self.samples * (len(measured) - 1)),
            "memory_mib": self.memory_mib,
            "first_step_seconds": self.ends[0] - self.launched,
        }


def team_job(name: str, model: Path, work: Work) -> JobSpec:
    """Return the work as a job of two policies, on policy."""
    given = job(name, [model] * len(AGENTS), work).model_dump(exclude_unset=True)
    return JobSpec.model_validate(given | {"workflow": "benchmarks.comlrl.workload:speak_together"})


async def troupe_window(directory: Path, model: Path, work: Work) -> Window:
    """Train on a cluster of its own, in fresh processes."""
    await asyncio.to_thread(directory.mkdir)
    with cluster(directory / "cluster") as (process, launched):
        window = Window(launched, process.pid, work.samples * len(AGENTS), [], [])
        state = await asyncio.to_thread(wait_ready, process, directory / "cluster")
        async with AsyncClient(state.orchestrator_address) as client, looking(window.look):
            handle = await client.submit(team_job("comlrl", model, work))
            async for event in handle.watch():
                if isinstance(event, MetricsLogged) and metric_names.STEP_SECONDS in event.values:
                    window.step(event.values[metric_names.REWARD_MEAN])
            await handle.result(timeout=60)
    return window


def comlrl_window(python: Path, model: Path, work: Work, *options: str) -> Window:
    """Train with CoMLRL in a fresh process. Blocking.

    It computes in one thread: its products, of one sequence each, are too small for two.
    """
    command = [str(python), "-m", "benchmarks.comlrl.comlrl_side", str(model)]
    command += [json.dumps(work.as_dict()), "--threads", "1", *options]
    launched = time.monotonic()
    with _running(command) as process:
        assert process.stdout is not None
        window = Window(launched, process.pid, 0, [], [])
        for line in process.stdout:
            if line.startswith('{"step"'):
                found = json.loads(line)
                window.samples = found["samples"]
                window.step(found["reward"])
    if len(window.ends) < work.steps:
        raise SystemExit(f"CoMLRL ended early; run `{' '.join(command)}` to see why")
    return window


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=peer_environment(threads=1),
    )
    try:
        yield process
    finally:
        end(process)


async def measure(directory: Path, plan: Plan, python: Path) -> dict[str, list[dict[str, float]]]:
    """Return each row's figures, window by window."""
    model = await asyncio.to_thread(save_model, directory / "model", plan.size, 0)
    # The rate is so small that the weights hardly move: every window measures the same work.
    work = replace(plan.work, steps=WARM + plan.steps, lr=1e-6)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for number in range(plan.windows):
        windows = {"troupe": await troupe_window(directory / f"window-{number}", model, work)}
        for name, options in (("comlrl", ()), ("comlrl_defaults", ("--defaults",))):
            windows[name] = await asyncio.to_thread(comlrl_window, python, model, work, *options)
        for name, window in windows.items():
            found[name].append(window.figures)
        rates = {
            name: f"{window.figures['samples_per_second']:.0f}" for name, window in windows.items()
        }
        progress(f"window {number + 1} of {plan.windows}, samples/s: {rates}")
    return found


async def learn(directory: Path, plan: Plan, python: Path) -> dict[str, Any]:
    """Train both sides from the same weights, seed after seed, and compare their rewards."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for seed in range(plan.seeds):
        work = replace(plan.work, seed=seed)
        model = await asyncio.to_thread(save_model, directory / f"seed-{seed}", plan.size, seed)
        async with asyncio.timeout(_RUN_SECONDS):
            ours.append((await troupe_window(directory / f"learn-{seed}", model, work)).rewards)
        theirs.append((await asyncio.to_thread(comlrl_window, python, model, work)).rewards)
        progress(f"seed {seed}: last rewards {ours[-1][-1]:.3f}, CoMLRL's {theirs[-1][-1]:.3f}")
    return compare(ours, theirs, peer="comlrl")


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the JSON object's figures: medians over windows."""
    names = list(found["troupe"][0])

    def over(figure: str) -> float:
        pairs = zip(found["troupe"], found["comlrl"], strict=True)
        return round(statistics.median(a[figure] / b[figure] for a, b in pairs), 3)

    return {
        "samples_ratio": over("samples_per_second"),
        "cpu_ratio": over("cpu_ms_per_sample"),
        "memory_ratio": over("memory_mib"),
        "first_step_ratio": over("first_step_seconds"),
        "absolute": {
            row: {name: round(statistics.median(w[name] for w in windows), 2) for name in names}
            for row, windows in found.items()
        },
    }


def table_of(absolute: dict[str, dict[str, float]]) -> Table:
    """Return the table of the absolute figures."""
    table = Table(title="A team of two policies of 0.36 million parameters, medians over windows")
    for heading in ("", "samples/s", "CPU ms/sample", "PSS, MiB", "first step, s"):
        table.add_column(heading, justify="right" if heading else "left")
    for row, label in ROWS.items():
        values = absolute[row]
        table.add_row(
            label,
            f"{values['samples_per_second']:.0f}",
            f"{values['cpu_ms_per_sample']:.1f}",
            f"{values['memory_mib']:.0f}",
            f"{values['first_step_seconds']:.1f}",
        )
    return table


async def run(directory: Path, plan: Plan) -> dict[str, Any]:
    """Measure everything; return the JSON object."""
    python = reference_python([COMLRL], directory / "reference", "comlrl")
    found = ratios(await measure(directory, plan, python))
    learned = await learn(directory, plan, python)
    return {**found, "learning_equal": learned["p"] > 0.05, "learning": learned}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--steps", type=int, help="measured steps of a window")
    parser.add_argument("--seeds", type=int)
    options = parser.parse_args(arguments)
    plan = PLANS[options.quick]
    plan = replace(
        plan,
        windows=options.windows or plan.windows,
        steps=options.steps or plan.steps,
        seeds=options.seeds or plan.seeds,
    )
    console = Console(stderr=options.json, width=130)
    with scratch() as directory:
        found = asyncio.run(run(directory, plan))
    console.print(table_of(found["absolute"]))
    low, high = found["learning"]["interval"]
    console.print(
        f"Troupe over CoMLRL: samples/s {found['samples_ratio']}, CPU {found['cpu_ratio']}, "
        f"memory {found['memory_ratio']}, first step {found['first_step_ratio']}; reward of the "
        f"last steps {found['learning']['difference']:+.3f}, 95 % interval "
        f"[{low:+.3f}, {high:+.3f}], p = {found['learning']['p']:.2f}"
    )
    found["load"] = round(os.getloadavg()[0], 1)
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
