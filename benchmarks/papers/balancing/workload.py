"""The job that every row runs: five policies, ten simulated engines, calls by Zipf's law.

docs/benchmarks/balancing.md explains the figures and their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.pipeline.research_team import AGENTS
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.job import JobSpec

# Engines of each policy at the start.
ENGINES: Final = 2
HEARTBEAT_SECONDS: Final = 0.25
# One engine decodes at 20 ms per step with eight turns at once: at most 400 tokens per second.
# Trainers take almost no time.
SIMULATED: Final = {
    "prefill_tokens_per_second": 50_000,
    "decode_seconds": 0.0192,
    "decode_seconds_per_turn": 0.0001,
    "response_tokens_mean": 60,
    "response_tokens_sigma": 0.8,
    "backward_tokens_per_second": 2_000_000,
    "step_seconds": 0.02,
    "load_seconds": 0.1,
}
# Without balancing: conversations are assigned round-robin, regardless of engines' load.
BLIND: Final = {
    "policy": "round_robin",
    "sticky": False,
    "priority": False,
    "adaptive_limit": False,
}
# The paper's threshold; times are a tenth of the defaults, like the turns.
MOVING: Final = {
    "inter": True,
    "threshold": 5,
    "sustain_seconds": 0.4,
    "cooldown_seconds": 1.0,
    "drain_seconds": 0.5,
}


@dataclass(frozen=True)
class Row:
    """The settings in which rows differ; everything else is equal."""

    name: str
    label: str
    routing: dict[str, Any]
    balancing: dict[str, Any]


ROWS: Final = (
    Row("none", "none (in turn)", BLIND, {"inter": False}),
    Row("intra", "within policies", {}, {"inter": False}),
    Row("both", "within and between", {}, MOVING),
)


@dataclass(frozen=True)
class Size:
    """The size of a run. The first step of each row is warm-up and not measured."""

    steps: int
    queries_per_step: int
    group_size: int
    moves: int


FULL: Final = Size(steps=4, queries_per_step=24, group_size=4, moves=1000)
QUICK: Final = Size(steps=2, queries_per_step=12, group_size=4, moves=60)


def model(directory: Path) -> dict[str, Any]:
    """Return the policies' model, which is never built: simulated engines only need a
    vocabulary."""
    vocabulary = save_tokenizer(directory / "tokenizer")
    return {
        "config": {"model_type": "qwen3", "vocab_size": vocabulary, "eos_token_id": 1},
        "tokenizer": str(directory / "tokenizer"),
    }


def job(row: Row, size: Size, directory: Path) -> JobSpec:
    """Return the job of one row; save its tokenizer under `directory`."""
    made = model(directory)
    engine = {"replicas": ENGINES, "max_running": 8, "max_context": 1024}
    return JobSpec.model_validate(
        {
            "name": f"balancing-{row.name}",
            "workflow": "benchmarks.papers.balancing.skewed_team:play",
            "tasks": {"source": "benchmarks.papers.balancing.skewed_team:Queries"},
            "agents": {
                name: {"policy": name, "sampling": {"max_new_tokens": 400}} for name in AGENTS
            },
            "policies": {
                name: {"model": made, "engine": engine, "simulated": SIMULATED} for name in AGENTS
            },
            "pipeline": {
                "steps": size.steps,
                "queries_per_step": size.queries_per_step,
                "group_size": size.group_size,
                "micro_batch_samples": 32,
            },
            "routing": row.routing,
            "balancing": row.balancing,
            "evaluation": {"queries": 0},
            "limits": {"max_concurrent_trajectories": size.queries_per_step * size.group_size},
            "logging": {"tensorboard": False},
        }
    )
