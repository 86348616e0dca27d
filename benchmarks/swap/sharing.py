"""Six policies on two trainers, and on six dedicated ones of the same total speed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.pipeline.measure import StepEnd, step_ends
from benchmarks.swap.six_players import AGENTS
from benchmarks.workloads.tokenizer import save_tokenizer
from testbed.timeline import TimelineSpan, busy_within, read_spans
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.job import JobSpec

SHARED: Final = 2
_ROW_SECONDS: Final = 900.0
# Engines are not measured: they always answer soon.
_ENGINES: Final = {
    "prefill_tokens_per_second": 200_000.0,
    "decode_seconds": 0.002,
    "decode_seconds_per_turn": 0.0,
    "response_tokens_mean": 60.0,
    "response_tokens_sigma": 0.4,
    "load_seconds": 0.01,
}


@dataclass(frozen=True)
class Sharing:
    """One row. Utilization and exposed swaps are fractions of the trainers' time."""

    label: str
    trainers: int
    seconds: float
    samples_per_second: float
    utilization: float
    exposed: float
    swaps: float


@dataclass(frozen=True)
class Scale:
    """The size of a row. A micro-batch takes one of the two trainers about `seconds`."""

    steps: int = 6
    queries: int = 16
    group_size: int = 4
    micro_batch: int = 16
    seconds: float = 0.6
    step_seconds: float = 0.2
    # As for 7B parameters on one device: 112 GB of state need 2 s over a link of 55 GB/s, and a
    # micro-batch of 64 samples of 4,096 tokens 28 s at 400 TFLOP/s: 7 %, the ratio used here.
    state_bytes: int = 256 << 20


async def run(label: str, trainers: int, slots: int, scale: Scale, where: Path) -> Sharing:
    """Measure one row on a separate cluster. Raises `JobFailed`."""
    traces = where / "traces"
    slower = trainers / SHARED
    async with _cluster(where, traces, trainers, slots) as client:
        handle = await client.submit(_job(scale, slower, where))
        steps = await step_ends(handle)
        await handle.result(timeout=_ROW_SECONDS)
    return figures(label, trainers, steps, read_spans(traces))


@asynccontextmanager
async def _cluster(
    where: Path, traces: Path, trainers: int, slots: int
) -> AsyncIterator[AsyncClient]:
    settings = ClusterSettings(
        data_dir=where / "runs",
        trainers=trainers,
        panel=False,
        threads=1,
        redis_fsync="everysec",
        # A loaded machine takes long to import torch eight times.
        start_seconds=600,
        environment={
            "TROUPE_SIMULATED_TRACE_DIR": str(traces),
            "TROUPE_TRAINER_SLOTS": str(slots),
            "TROUPE_TRAINER_SYNC_FILES": "false",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        },
    )
    async with (
        EmbeddedCluster(settings) as running,
        AsyncClient(running.state.orchestrator_address) as client,
    ):
        yield client


def _job(scale: Scale, slower: float, where: Path) -> JobSpec:
    vocabulary = save_tokenizer(where / "tokenizer")
    model = {
        "config": {"model_type": "qwen3", "vocab_size": vocabulary, "eos_token_id": 1},
        "tokenizer": str(where / "tokenizer"),
    }
    # About 80 tokens of prompt and 60 of response.
    speed = scale.micro_batch * 140 / scale.seconds / slower
    simulated = {
        **_ENGINES,
        "backward_tokens_per_second": speed,
        "step_seconds": scale.step_seconds * slower,
        "state_bytes": scale.state_bytes,
    }
    pipeline: dict[str, Any] = {
        "mode": "async",
        "alpha": 2,
        "steps": scale.steps,
        "queries_per_step": scale.queries,
        "group_size": scale.group_size,
        "micro_batch_samples": scale.micro_batch,
    }
    return JobSpec.model_validate(
        {
            "name": "swap",
            "workflow": "benchmarks.swap.six_players:play",
            "tasks": {"source": "benchmarks.swap.six_players:Queries"},
            "agents": {
                name: {"policy": name, "sampling": {"max_new_tokens": 200}} for name in AGENTS
            },
            "policies": {
                name: {
                    "model": model,
                    "simulated": simulated,
                    "trainer": {"quantum_seconds": 2 * scale.seconds},
                }
                for name in AGENTS
            },
            "algorithm": {"correction": "truncated"},
            "pipeline": pipeline,
            "evaluation": {"queries": 0},
            "logging": {"tensorboard": False},
        }
    )


def figures(
    label: str, trainers: int, steps: Sequence[StepEnd], spans: Sequence[TimelineSpan]
) -> Sharing:
    """Return the figures of all steps except the first, which fills the pipeline, and the last,
    which empties it.

    Policies are up to `alpha` steps ahead of the ending step, by varying amounts: samples are
    counted by the computation meanwhile.
    """
    start, end = steps[0].at, steps[-2].at
    work = [one for one in spans if one.what in ("train", "step")]
    lanes = sorted({one.lane for one in work})
    busy = sum(busy_within([s for s in work if s.lane == lane], start, end) for lane in lanes)
    inside = steps[1:-1]
    total = trainers * (end - start)

    def over(name: str) -> float:
        return sum(
            one.values.get(f"{agent}/train/{name}", 0.0) for one in inside for agent in AGENTS
        )

    tokens = sum(_inside(one, start, end) * one.level for one in work if one.what == "train")
    return Sharing(
        label=label,
        trainers=trainers,
        seconds=(end - start) / len(inside),
        samples_per_second=tokens / _tokens_per_sample(steps) / (end - start),
        utilization=busy / total,
        exposed=over("swap_seconds") / total,
        swaps=over("swaps") / len(inside),
    )


def _inside(span: TimelineSpan, start: float, end: float) -> float:
    """Return the seconds of the span in [start, end]."""
    return max(0.0, min(span.end, end) - max(span.start, start)) / (span.end - span.start)


def _tokens_per_sample(steps: Sequence[StepEnd]) -> float:
    def total(name: str) -> float:
        return sum(one.values[f"{agent}/{name}"] for one in steps for agent in AGENTS)

    return total("tokens") / total("samples")
