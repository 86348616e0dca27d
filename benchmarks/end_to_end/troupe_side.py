"""Troupe's side: a job through all services of an embedded cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.workload import AGENT, TOKENS, Work
from troupe.client import AsyncClient, MetricsLogged
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.job import JobSpec


@dataclass(frozen=True)
class Step:
    """A step from the job's events; `at`: the wall-clock time of its end, in seconds."""

    at: float
    values: dict[str, float]


@contextlib.asynccontextmanager
async def cluster(data_dir: Path, **settings: Any) -> AsyncIterator[AsyncClient]:
    """Yield the client of a cluster of real processes on this machine's cores."""
    made = ClusterSettings(data_dir=data_dir, panel=False, **settings)
    async with (
        EmbeddedCluster(made) as running,
        AsyncClient(running.state.orchestrator_address) as client,
    ):
        yield client


def job(name: str, models: list[Path], work: Work, *, waves: int = 1, **pipeline: Any) -> JobSpec:
    """Return the work as a job, in which every model is a policy with its own agent.

    Engines draw a step's turns in `waves` waves: while they draw one, the previous one is trained.
    """
    names = [AGENT if not number else f"{AGENT}-{number}" for number in range(len(models))]
    return JobSpec.model_validate(
        {
            "name": name,
            "seed": work.seed,
            "workflow": "benchmarks.end_to_end.workload:speak",
            "tasks": {
                "source": "benchmarks.end_to_end.workload:Tasks",
                "args": {"count": work.tasks},
            },
            "agents": {n: {"policy": n, "sampling": {"max_new_tokens": TOKENS}} for n in names},
            "policies": {
                n: {
                    "model": {"path": str(model), "dtype": work.dtype},
                    "optimizer": {
                        "lr": work.lr,
                        "betas": [work.beta1, work.beta2],
                        "max_grad_norm": work.max_grad_norm,
                    },
                    "engine": {
                        "max_running": work.samples // waves,
                        "max_context": 64,
                    },
                    # A micro-batch, 1,040 tokens with prompts shared, is one pass.
                    "trainer": {"forward_tokens": 2048},
                }
                for n, model in zip(names, models, strict=True)
            },
            "algorithm": {"clip_low": work.clip, "clip_high": work.clip},
            "pipeline": {
                "mode": "micro_batch",
                "steps": work.steps,
                "queries_per_step": work.queries,
                "group_size": work.group,
                "micro_batch_samples": work.samples // 4,
                # As far as this needs no weights.
                "early_start": pipeline.get("mode") != "async",
                **pipeline,
            },
            "evaluation": {"queries": 0},
            "logging": {"tensorboard": False},
        }
    )


async def run(client: AsyncClient, spec: JobSpec) -> list[Step]:
    """Train to the end; return the steps in order. Raises `JobFailed`."""
    handle = await client.submit(spec)
    steps = [
        Step(event.at.timestamp(), event.values)
        async for event in handle.watch()
        if isinstance(event, MetricsLogged) and metric_names.STEP_SECONDS in event.values
    ]
    await handle.result(timeout=60)
    return steps
