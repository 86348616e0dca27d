"""The cost of a cluster before it does any work: start, first training step, memory.

    python -m benchmarks.startup [--quick] [--json] [--runs 3] [--data-dir runs/startup]

Starts `troupe up` in a fresh process, waits until the cluster is ready, submits a job with a team
of two policies (0.36 and 0.15 million parameters with random weights) and follows it to the end of
its third step. `start_*` are figures at readiness, `first_step_*` from the launch of `troupe up` to
the end of step 1. CPU seconds count all processes of the cluster, the supervisor and ended
ones included; memory is the sum of their proportional set sizes (PSS), in which a shared page
counts once. `memory_mib` is the largest sum, sampled every half second until the third step ends.
`--quick` stops at readiness. The files are in the page cache after the first run, which is not
counted unless it is the only one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import end, finish, run_program
from troupe.client import AsyncClient, MetricsLogged
from troupe.client.cli.specification import apply_assignments
from troupe.cluster.state import ClusterState, read_state
from troupe.job import parse_job

_JOB: Final = Path("troupe/demo/job.yaml")
_STEPS: Final = 3
_START_SECONDS: Final = 300.0
_STEP_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_MODELS: Final = """
import sys
from troupe.demo.models import make_model, make_tokenizer
for name in ("solver", "checker"):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(f"{sys.argv[1]}/{name}")
    make_model(name, tokenizer, 0).save_pretrained(f"{sys.argv[1]}/{name}")
"""


@dataclass(frozen=True)
class Usage:
    """CPU seconds, PSS in MiB and names of a tree of processes at one time."""

    cpu_seconds: float
    memory: dict[str, float]

    @property
    def memory_mib(self) -> float:
        """The sum over the processes."""
        return sum(self.memory.values())


@dataclass
class Run:
    """One start's figures."""

    start_seconds: float
    start: Usage
    first_step_seconds: float = 0.0
    first_step_cpu_seconds: float = 0.0
    last: Usage | None = None
    memory_mib: float = 0.0
    steps: list[float] = field(default_factory=list)


def usage_of(supervisor: int, names: dict[int, str] | None = None) -> Usage:
    """Return the usage of the process `supervisor` and all below it; `names`: of some of them."""
    cpu, memory = 0.0, {}
    root = psutil.Process(supervisor)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            name = (names or {}).get(process.pid) or _name_of(process)
            pss = process.memory_full_info().pss / 2**20
            cpu += sum(times[:4])  # with the processes that it has waited for
            memory[f"{name} ({process.pid})"] = round(pss, 1)
    return Usage(round(cpu, 2), memory)


def _name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()


@contextlib.asynccontextmanager
async def looking(look: Callable[[], None]) -> AsyncIterator[None]:
    """Call `look` in a thread, every half second."""

    async def repeat() -> None:
        while True:
            await asyncio.to_thread(look)
            await asyncio.sleep(_LOOK_SECONDS)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def cluster(data_dir: Path) -> Iterator[tuple[subprocess.Popen[Any], float]]:
    """`troupe up` in `data_dir`, and the time of its launch."""
    command = [sys.executable, "-m", "troupe.client.cli", "up", "--data-dir", str(data_dir)]
    with (data_dir.parent / "up.log").open("wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process, began
    finally:
        end(process)


def wait_ready(process: subprocess.Popen[Any], data_dir: Path) -> ClusterState:
    """Return the state of the cluster once all services are healthy."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        state = read_state(data_dir)
        if state is not None and state.phase == "ready":
            return state
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise SystemExit(f"the cluster did not start; see {data_dir.parent / 'up.log'}")


async def follow(run: Run, process: int, began: float, state: ClusterState, models: Path) -> None:
    """Submit the job and complete `run` with its first steps."""
    names = {one.pid: one.name for one in state.services if one.pid is not None}
    changes = [
        f"pipeline.steps={_STEPS}",
        *(f"policies.{name}.model.path={models / name}" for name in ("solver", "checker")),
    ]
    job = apply_assignments(_JOB.read_text(), changes)
    spec = parse_job(json.dumps({k: job[k] for k in job if k not in ("evaluation", "checkpoint")}))

    def look() -> None:
        run.last = usage_of(process, names)
        run.memory_mib = max(run.memory_mib, run.last.memory_mib)

    async with (
        AsyncClient(state.orchestrator_address) as client,
        looking(look),
        asyncio.timeout(_STEP_SECONDS),
    ):
        handle = await client.submit(spec)
        async for event in handle.watch():
            if not isinstance(event, MetricsLogged):
                continue
            run.steps.append(time.monotonic() - began)
            if len(run.steps) == 1:
                run.first_step_seconds = run.steps[0]
                run.first_step_cpu_seconds = usage_of(process).cpu_seconds
            if event.step >= _STEPS:
                break
        await handle.result(timeout=60)


def measure(data_dir: Path, models: Path | None) -> Run:
    """Start a cluster once; with `models`, train the job's first steps."""
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.mkdir(parents=True)
    with cluster(data_dir) as (process, began):
        state = wait_ready(process, data_dir)
        seconds = time.monotonic() - began
        names = {one.pid: one.name for one in state.services if one.pid is not None}
        run = Run(seconds, usage_of(process.pid, names))
        if models is not None:
            asyncio.run(follow(run, process.pid, began, state, models))
    return run


def report(run: Run, console: Console) -> None:
    """Print one run."""
    table = Table(title=f"ready after {run.start_seconds:.1f} s, {run.start.cpu_seconds} CPU s")
    for column in ("process", "PSS when ready, MiB", "in the job, MiB"):
        table.add_column(column, justify="left" if column == "process" else "right")
    last = run.last.memory if run.last else {}
    for name in dict.fromkeys([*run.start.memory, *last]):
        table.add_row(name, *(str(found.get(name, "")) for found in (run.start.memory, last)))
    sums = [f"{run.start.memory_mib:.0f}", f"{run.last.memory_mib:.0f}" if run.last else ""]
    table.add_row("sum", *sums)
    console.print(table)
    if run.last:
        console.print(
            f"first step after {run.first_step_seconds:.1f} s, {run.first_step_cpu_seconds} CPU s; "
            f"memory at most {run.memory_mib:.0f} MiB"
        )


def main() -> None:
    """Run; the last line of stdout is the JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="stop when the cluster is ready")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--runs", type=int, default=3, help="starts that count")
    parser.add_argument("--data-dir", type=Path, default=Path("runs/startup"))
    args = parser.parse_args()
    console = Console(stderr=args.json)
    home = args.data_dir.absolute()
    home.mkdir(parents=True, exist_ok=True)
    models = None
    if not args.quick:
        models = home / "models"
        subprocess.run([sys.executable, "-c", _MODELS, str(models)], check=True, stdout=sys.stderr)
    runs = []
    for _ in range(args.runs + (args.runs > 1)):
        runs.append(measure(home / "cluster", models))
        report(runs[-1], console)
    counted = runs[1:] or runs
    found: dict[str, Any] = {
        "start_seconds": statistics.median(r.start_seconds for r in counted),
        "start_cpu_seconds": statistics.median(r.start.cpu_seconds for r in counted),
        "start_memory_mib": statistics.median(r.start.memory_mib for r in counted),
        "processes": len(counted[-1].start.memory),
    }
    if models is not None:
        found |= {
            "first_step_seconds": statistics.median(r.first_step_seconds for r in counted),
            "first_step_cpu_seconds": statistics.median(r.first_step_cpu_seconds for r in counted),
            "memory_mib": statistics.median(r.memory_mib for r in counted),
        }
    found["memory_by_process"] = (counted[-1].last or counted[-1].start).memory
    finish(found, quiet=args.json)


if __name__ == "__main__":
    run_program(main)
