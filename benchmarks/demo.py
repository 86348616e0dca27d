"""The example team before and after RL, over several seeds, on an embedded cluster.

    python -m benchmarks.demo [--seeds 0 1 2] [--json]

`before` and `after` are held-out team success (mean over seeds), both measured by the cluster
itself on the same queries; the warm-start precedes `before`. `peak_rss_mib` is the largest sum of
the proportional set sizes of all the cluster's processes, sampled once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program
from troupe.client import AsyncClient, MetricsLogged
from troupe.client.cli.specification import apply_assignments
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.job import JobSpec, parse_job

JOB = Path("troupe/demo/job.yaml")
SAMPLE_SECONDS = 1.0


@dataclass
class Run:
    """One seed's figures."""

    seed: int
    before: float
    after: float
    warm_start_seconds: float
    rl_seconds: float
    tokens_per_second: float
    peak_rss_mib: float
    steps: int


def prepare(seed: int, data_dir: Path, changes: list[str]) -> tuple[JobSpec, float]:
    """Warm-start the models of `seed`; return the job that trains them, and the seconds."""
    models = data_dir / "models" / f"seed-{seed}"
    started = time.monotonic()
    warm_start = [sys.executable, "-m", "troupe.demo.warm_start"]
    subprocess.run(
        [*warm_start, "--out", str(models), "--seed", str(seed)], check=True, stdout=sys.stderr
    )
    warm = time.monotonic() - started
    changed = apply_assignments(
        JOB.read_text(),
        [
            f"seed={seed}",
            f"policies.solver.model.path={models / 'solver'}",
            f"policies.checker.model.path={models / 'checker'}",
            *changes,
        ],
    )
    return parse_job(json.dumps(changed)), warm


async def run(seed: int, data_dir: Path, spec: JobSpec, warm: float, console: Console) -> Run:
    """Train one seed; `rl_seconds` is first step to last, evaluations excluded."""
    async with (
        EmbeddedCluster(ClusterSettings(data_dir=data_dir / f"seed-{seed}")) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
        PeakMemory() as memory,
    ):
        handle = await client.submit(spec)
        rates: list[float] = []
        seconds = 0.0
        async for event in handle.watch():
            if isinstance(event, MetricsLogged) and metric_names.STEP_SECONDS in event.values:
                seconds += event.values[metric_names.STEP_SECONDS]
                rates.append(event.values[metric_names.TOKENS_PER_SECOND])
                if event.step % 10 == 0:
                    console.print(
                        f"seed {seed} step {event.step}/{spec.pipeline.steps}: "
                        f"team {event.values[metric_names.TEAM_MEAN]:.3f}, {seconds:.0f} s"
                    )
        result = await handle.result(timeout=60)
    return Run(
        seed=seed,
        before=result.before["team_success"],
        after=result.after["team_success"],
        warm_start_seconds=warm,
        rl_seconds=seconds,
        tokens_per_second=statistics.fmean(rates),
        peak_rss_mib=memory.peak / 2**20,
        steps=spec.pipeline.steps,
    )


class PeakMemory:
    """The peak total memory of this process's descendants, in bytes, while the context is open."""

    def __init__(self) -> None:
        self.peak = 0

    async def __aenter__(self) -> PeakMemory:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _sample(self) -> None:
        me = psutil.Process(os.getpid())
        while True:
            total = 0
            for child in me.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    # Shared pages count once in the proportional size, many times in RSS.
                    total += child.memory_full_info().pss
            self.peak = max(self.peak, total)
            await asyncio.sleep(SAMPLE_SECONDS)


def main() -> None:
    """Run all seeds; the last line of stdout is the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path, default=Path("runs/benchmark-demo"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json)
    data_dir = args.data_dir.absolute()
    runs = []
    for seed in args.seeds:
        spec, warm = prepare(seed, data_dir, args.set)
        runs.append(asyncio.run(run(seed, data_dir, spec, warm, console)))
    table = Table(title="Held-out team success")
    for column in ("seed", "before", "after", "RL s", "tokens/s", "peak MiB", "warm-start s"):
        table.add_column(column, justify="right")
    for r in runs:
        table.add_row(
            str(r.seed),
            f"{r.before:.3f}",
            f"{r.after:.3f}",
            f"{r.rl_seconds:.0f}",
            f"{r.tokens_per_second:.0f}",
            f"{r.peak_rss_mib:.0f}",
            f"{r.warm_start_seconds:.0f}",
        )
    console.print(table)
    finish(
        {
            "before": statistics.fmean(r.before for r in runs),
            "after": statistics.fmean(r.after for r in runs),
            "rl_seconds": max(r.rl_seconds for r in runs),
            "tokens_per_second": statistics.fmean(r.tokens_per_second for r in runs),
            "peak_rss_mib": max(r.peak_rss_mib for r in runs),
            "seeds": [asdict(r) for r in runs],
        },
        quiet=args.json,
    )


if __name__ == "__main__":
    run_program(main)
