"""The load of thousands of long conversations on the services, without engines and trainers.

    python -m benchmarks.scale [--quick] [--json] [--conversations N ...] [--workers N ...]

Real services, Redis, gRPC and rows; engines and trainers are paced (`policies.X.simulated`). One
step of N concurrent conversations, 10 turns and about 4,000 tokens each, with N rollout workers.
The last line is one JSON object for the most conversations and workers:

- `cpu_s_per_1000_turns`: CPU seconds of each service; `total`: of all. `engines` is the cost of the
  paced engines, which is part of `rollout`; `services` is `total` without it. Goal: `services` <=
  2.5, and the orchestrator at most 5 % of `total`.
- `bytes_over_unique`: bytes from rollout to the store over the unique tokens of the conversations
  (4 bytes of an id, 4 more of a log-prob). Goal 1.15.
- `growth_2000_to_8000`: `total` with the most conversations over `total` with the fewest. Goal 1.1.
- `stall_ms`: by service, the longest stall of an event loop, and the most that its thread computed
  in a stall, which does not depend on other load on the machine; both as the upper bound of a
  bucket (`troupe_event_loop_late_seconds`). Goal 100.

Rows pass through proxies that count bytes, whose CPU time is not counted for the services.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.workloads.tokenizer import save_tokenizer
from testbed.chaos.proxy import ProxiedNetwork
from testbed.simulated_engine import SimulatedEngine
from troupe.client import AsyncClient, JobFailed, MetricsLogged
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.cluster.layout import ANYBODY, links
from troupe.job import JobSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

TURNS: Final = 10
# Characters, which are tokens here, of a question, and of an average reply.
QUESTION, REPLY = 200, 200
GROUP: Final = 8
# Engines of a cluster, and the turns of each, with room for all conversations.
ENGINES: Final = 16
PACE: Final = {
    "prefill_tokens_per_second": 200_000,
    "decode_seconds_per_turn": 0.0,
    "response_tokens_mean": REPLY,
    "response_tokens_sigma": 0.3,
    "backward_tokens_per_second": 10_000_000,
    "step_seconds": 0.05,
    "load_seconds": 0.05,
}
# Rate of a generating GPU, by SGLang's published figures for 8 to 32 B parameters at such contexts;
# half of a cluster's GPUs generate, half train.
TOKENS_PER_GPU: Final = 2_500
CLUSTERS: Final = (64, 256)
_ROW_SECONDS: Final = 3000.0
_LOOK_SECONDS: Final = 2.0
_LATE: Final = re.compile(
    r'troupe_event_loop_late_seconds_bucket\{clock="(\w+)",le="(\S+)"\} (\S+)'
)


@dataclass
class Figures:
    """Measurements of one row. By service, summed over workers of a kind: CPU seconds, peak
    resident bytes; longest stalls (wall, CPU) in seconds; bytes by (caller, callee)."""

    conversations: int
    workers: int
    seconds: float = 0.0
    tokens: float = 0.0
    replied: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)
    engines: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, tuple[float, float]] = field(default_factory=dict)
    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Turns of all conversations."""
        return self.conversations * TURNS

    @property
    def per_1000(self) -> dict[str, float]:
        """CPU seconds per 1,000 turns by service, in total (`total`), of the paced engines, and in
        total without these (`services`)."""
        found = {name: 1000 * seconds / self.turns for name, seconds in self.cpu.items()}
        total = sum(found.values())
        return {**found, "total": total, "engines": self.engines, "services": total - self.engines}

    @property
    def unique_bytes(self) -> float:
        """Bytes of each unique token's id, and of a log-prob per token of a reply."""
        return 4 * (self.tokens + self.replied)

    @property
    def over_unique(self) -> float:
        """Bytes between rollout workers and the store, both ways, over the unique bytes."""
        return self.sent[("rollout", "experience_store")] / self.unique_bytes


def job(conversations: int, workers: int, directory: Path) -> JobSpec:
    """Return a job with a step of `conversations` concurrent conversations; save the tokenizer
    under `directory`."""
    vocabulary = save_tokenizer(directory / "tokenizer", ends=False)
    return JobSpec.model_validate(
        {
            "name": f"scale-{conversations}-{workers}",
            "workflow": "benchmarks.workloads.plain_turns:talk",
            "tasks": {
                "source": "benchmarks.workloads.plain_turns:Queries",
                "args": {"turns": TURNS, "words": QUESTION // 8},
            },
            "agents": {"player": {"policy": "policy", "sampling": {"max_new_tokens": 2 * REPLY}}},
            "policies": {
                "policy": {
                    "model": {
                        "config": {"model_type": "qwen3", "vocab_size": vocabulary},
                        "tokenizer": str(directory / "tokenizer"),
                    },
                    "engine": {
                        "replicas": max(1, ENGINES // workers),
                        "max_running": max(16, 2 * conversations // ENGINES),
                        "max_context": 2 * TURNS * (QUESTION + REPLY),
                    },
                    # Few conversations need not last as long.
                    "simulated": PACE
                    | {"decode_seconds": 0.02 if conversations >= 1000 else 0.005},
                }
            },
            "pipeline": {
                "steps": 1,
                "queries_per_step": conversations // GROUP,
                "group_size": GROUP,
                "micro_batch_samples": 512,
                "mode": "micro_batch",
            },
            "evaluation": {"queries": 0},
            "limits": {
                "max_concurrent_trajectories": conversations,
                "turn_seconds": _ROW_SECONDS,
                "trajectory_seconds": _ROW_SECONDS,
            },
            "logging": {"tensorboard": False},
        }
    )


class Cluster:
    """An embedded cluster whose calls pass through proxies that count bytes."""

    def __init__(self, data_dir: Path, workers: int) -> None:
        self._settings = ClusterSettings(
            data_dir=data_dir,
            rollouts=workers,
            trainers=1,
            panel=False,
            start_seconds=900,  # the machine may be busy
        )
        self._pairs = links(self._settings)
        self._network = ProxiedNetwork(self._pairs)
        self._running = EmbeddedCluster(self._settings, router=self._network.route)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncClient]:
        """Start the cluster; yield the client of its orchestrator."""
        try:
            async with (
                self._running,
                AsyncClient(self._running.state.orchestrator_address) as client,
            ):
                yield client
        finally:
            await self._network.close()

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds so far by service, child processes included."""
        found: dict[str, float] = defaultdict(float)
        for name, process in self._processes():
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    found[name] += sum(one.cpu_times()[:2])
        return dict(found)

    def memory(self) -> dict[str, int]:
        """Return the current resident bytes by service."""
        found: dict[str, int] = defaultdict(int)
        for name, process in self._processes():
            found[name] += process.memory_info().rss
        return dict(found)

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes so far by (caller, callee), both ways."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        for caller, callee in self._pairs:
            passed = self._network.link((caller, callee)).passed
            caller = "orchestrator" if caller == ANYBODY else _kind(caller)
            found[caller, _kind(callee)] += passed
        return dict(found)

    async def late(self) -> dict[str, dict[tuple[str, float], float]]:
        """Return, by service, how many checks of its event loop were late by at most a number of
        seconds, by clock and seconds."""
        found: dict[str, dict[tuple[str, float], float]] = {}
        for service in self._running.state.services:
            if service.metrics_address:
                text = await asyncio.to_thread(_read, f"http://{service.metrics_address}/metrics")
                counts = found.setdefault(_kind(service.name), defaultdict(float))
                for clock, most, count in _LATE.findall(text):
                    counts[clock, float(most)] += float(count)
        return found

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        services = self._running.state.services
        return [(_kind(s.name), psutil.Process(s.pid)) for s in services if s.pid is not None]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def _kind(service: str) -> str:
    return service.rstrip("-0123456789")


def longest(
    before: Mapping[tuple[str, float], float], after: Mapping[tuple[str, float], float], clock: str
) -> float:
    """Return the seconds of the longest stall since `before`, as the bound of its bucket."""
    new = {most: count - before[c, most] for (c, most), count in after.items() if c == clock}
    total = max(new.values())
    return min(most for most, count in new.items() if count == total)


async def row(conversations: int, workers: int, directory: Path, engines: float) -> Figures:
    """Measure one step on a separate cluster, after a small job that takes imports and first
    connections. Raises `JobFailed`."""
    cluster = Cluster(directory / f"data-{conversations}-{workers}", workers)
    found = Figures(conversations, workers, engines=engines)
    async with cluster.open() as client:
        await _run(client, job(2 * GROUP, workers, directory))
        watch = asyncio.create_task(_watch(cluster, found))
        late = await cluster.late()
        before, sent, began = cluster.cpu(), cluster.sent(), time.monotonic()
        values = await _run(client, job(conversations, workers, directory))
        found.seconds = time.monotonic() - began
        found.cpu = {name: value - before[name] for name, value in cluster.cpu().items()}
        found.sent = {pair: value - sent[pair] for pair, value in cluster.sent().items()}
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        for name, counts in (await cluster.late()).items():
            wall, cpu = (longest(late[name], counts, clock) for clock in ("wall", "cpu"))
            found.stalls[name] = wall, cpu
    found.replied = values["response_length/player"] * conversations * TURNS
    found.tokens = found.replied + conversations * TURNS * (QUESTION + 1)
    return found


async def _run(client: AsyncClient, spec: JobSpec) -> dict[str, float]:
    """Run a job to its end; return its metrics. Raises `JobFailed`."""
    handle = await client.submit(spec)
    values: dict[str, float] = {}
    async with asyncio.timeout(_ROW_SECONDS):
        async for event in handle.watch():
            if isinstance(event, MetricsLogged):
                values |= event.values
        await handle.result(timeout=60)
    return values


async def _watch(cluster: Cluster, found: Figures) -> None:
    while True:
        for name, size in cluster.memory().items():
            found.memory[name] = max(size, found.memory.get(name, 0))
        await asyncio.sleep(_LOOK_SECONDS)


async def engine_cost(directory: Path, turns: int) -> float:
    """Return the CPU seconds per 1,000 turns of a paced engine alone, with all turns at once."""
    import torch

    transfer = Transfer(directory / "transfer")
    manifest = transfer.set("weights", {"nothing": torch.zeros(1)})
    ref = common_pb.WeightsRef(policy="policy", key="weights", checksum=manifest.checksum)
    engine = SimulatedEngine("alone", "policy", job(4 * turns, 4, directory).policies["policy"])
    await engine.start()
    await engine.update_weights(ref, transfer)
    prompt = [3] * (TURNS * (QUESTION + REPLY) // 2)

    async def turn(number: int) -> None:
        sampling = Sampling(max_new_tokens=2 * REPLY, seed=number)
        await engine.generate(str(number), prompt, sampling, deadline_seconds=300)

    began = time.process_time()
    await asyncio.gather(*(turn(number) for number in range(turns)))
    spent = time.process_time() - began
    await engine.stop()
    return 1000 * spent / turns


def show(rows: list[Figures], console: Console) -> None:
    """Print the tables."""
    table = Table(title=f"CPU seconds per 1,000 turns ({TURNS} turns, 4,000 tokens each)")
    names = ("rollout", "experience_store", "redis", "trainer", "reward", "orchestrator", "total")
    for heading in ("at once", "workers", *names, "engines", "without", "wall s"):
        table.add_column(heading.replace("experience_", ""), justify="right")
    for one in rows:
        values = one.per_1000
        cells = [f"{values.get(name, 0):.3f}" for name in (*names, "engines", "services")]
        table.add_row(str(one.conversations), str(one.workers), *cells, f"{one.seconds:.0f}")
    console.print(table)
    table = Table(title="memory (MiB, workers of a kind summed), longest stall (ms, CPU ms of it)")
    for heading in ("at once", "workers", *names[:-1]):
        table.add_column(heading.replace("experience_", ""), justify="right")
    for one in rows:
        cells = []
        for name in names[:-1]:
            cell = f"{one.memory.get(name, 0) / 2**20:.0f}"
            if name in one.stalls:
                wall, cpu = one.stalls[name]
                cell += f"; {1e3 * wall:.0f} ({1e3 * cpu:.0f})"
            cells.append(cell)
        table.add_row(str(one.conversations), str(one.workers), *cells)
    console.print(table)
    table = Table(title="bytes through each link per unique byte (an id, a log-prob, each once)")
    pairs = sorted({pair for one in rows for pair in one.sent if one.sent[pair] > 1e5})
    for heading in ("at once", "workers", *(f"{caller} > {callee}" for caller, callee in pairs)):
        table.add_column(heading.replace("experience_", ""), justify="right")
    for one in rows:
        cells = [f"{one.sent.get(pair, 0) / one.unique_bytes:.3f}" for pair in pairs]
        table.add_row(str(one.conversations), str(one.workers), *cells)
    console.print(table)
    console.print(cluster_table(rows[-1]))


def cluster_table(one: Figures) -> Table:
    """Return the table of clusters' load on the services, from the figures of a row."""
    table = Table(
        title=f"load on the services if half of the GPUs generate {TOKENS_PER_GPU:,} tokens/s each"
    )
    values = one.per_1000
    names = ("rollout", "experience_store", "redis", "trainer", "orchestrator")
    for heading in ("GPUs", "turns/s", *(f"{name}: cores" for name in names), "rows: MB/s"):
        table.add_column(heading.replace("experience_", ""), justify="right")
    for gpus, asked in clusters(one).items():
        cores = [f"{asked['turns_per_second'] * values[name] / 1000:.2f}" for name in names]
        rows = asked["rows_bytes_per_second"] / 1e6
        table.add_row(gpus, f"{asked['turns_per_second']:.0f}", *cores, f"{rows:.1f}")
    return table


def clusters(one: Figures) -> dict[str, dict[str, float]]:
    """Return, by number of GPUs: turns per second, cores for all services, bytes of rows per
    second."""
    found = {}
    for gpus in CLUSTERS:
        rate = gpus / 2 * TOKENS_PER_GPU * one.turns / one.replied
        rows = one.sent[("rollout", "experience_store")] / one.turns
        found[str(gpus)] = {
            "turns_per_second": round(rate, 1),
            "cores": round(rate * one.per_1000["total"] / 1000, 2),
            "rows_bytes_per_second": round(rate * rows),
        }
    return found


def summary(rows: list[Figures]) -> dict[str, Any]:
    """Return the JSON object."""
    last = rows[-1]
    alike = [one for one in rows if one.workers == last.workers]
    share = last.per_1000["orchestrator"] / last.per_1000["total"]
    return {
        "cpu_s_per_1000_turns": _rounded(last.per_1000),
        "orchestrator_share": round(share, 4),
        "bytes_over_unique": round(last.over_unique, 3),
        "growth_2000_to_8000": round(last.per_1000["total"] / alike[0].per_1000["total"], 3),
        "stall_ms": {name: _ms(both) for name, both in last.stalls.items()},
        "memory_mib": {name: round(size / 2**20) for name, size in last.memory.items()},
        "clusters": clusters(last),
        "rows": [summary_of(one) for one in rows],
    }


def summary_of(one: Figures) -> dict[str, Any]:
    """Return a row of the JSON object."""
    return {
        "conversations": one.conversations,
        "workers": one.workers,
        "cpu_s_per_1000_turns": _rounded(one.per_1000),
        "bytes_over_unique": round(one.over_unique, 3),
        "stall_ms": {name: _ms(both) for name, both in one.stalls.items()},
        "seconds": round(one.seconds, 1),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _ms(both: tuple[float, float]) -> dict[str, float]:
    return {"wall": round(1e3 * both[0], 1), "cpu": round(1e3 * both[1], 1)}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 conversations, two workers")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--conversations", type=int, nargs="+", help="at once, ascending")
    parser.add_argument("--workers", type=int, nargs="+", help="rollout workers, ascending")
    options = parser.parse_args()
    sizes = options.conversations or ([200] if options.quick else [2000, 8000])
    workers = options.workers or ([2] if options.quick else [1, 2, 4])
    console = Console(stderr=options.json, width=None if options.json else 150)
    os.environ["TROUPE_REWARD_WORKERS"] = "1"
    rows: list[Figures] = []
    with scratch() as directory:
        engines = asyncio.run(engine_cost(directory, 64 if options.quick else 500))
        for count in workers:
            for size in sizes:
                try:
                    rows.append(asyncio.run(row(size, count, directory, engines)))
                except JobFailed as error:
                    raise SystemExit(f"{size} conversations, {count} workers: {error}") from error
                console.print(summary_of(rows[-1]))
    show(rows, console)
    finish(summary(rows), quiet=options.json)


if __name__ == "__main__":
    run_program(main)
