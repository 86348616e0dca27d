"""The jobs of the trajectory benchmark, explained in docs/benchmarks/trajectories.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.trajectories.slow_worlds import AGENT
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.job import JobSpec

# The papers' environment steps take 10 s on average; here one second stands for 20.
MEAN_SECONDS: Final = 10.0
SCALE: Final = 1 / 20
# A turn of about 30 tokens takes a tenth to a fifth of a second, depending on the engines' load:
# about 3 s of the papers' time, a third of an environment step.
PACE: Final = {
    "prefill_tokens_per_second": 30_000,
    "decode_seconds": 0.002,
    "decode_seconds_per_turn": 0.00003,
    "response_tokens_mean": 30,
    "response_tokens_sigma": 0.6,
    "backward_tokens_per_second": 60_000,
    "step_seconds": 0.05,
    "load_seconds": 0.05,
}


@dataclass(frozen=True)
class Size:
    """The size of a run. `scale`: seconds here per second of the papers."""

    queries_per_step: int
    group_size: int
    turns: int
    steps: int
    scale: float = SCALE


FULL: Final = Size(queries_per_step=8, group_size=8, turns=6, steps=8)
QUICK: Final = Size(queries_per_step=4, group_size=4, turns=3, steps=4, scale=1 / 50)


@dataclass(frozen=True)
class Row:
    """One job of a table: its differences from the others."""

    name: str
    sigma: float
    """Standard deviation of an environment step, in the papers' seconds."""
    pipeline: dict[str, Any]
    world: dict[str, float] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


def lockstep_rows(sigmas: tuple[float, ...]) -> list[tuple[Row, Row]]:
    """Return, for each sigma, the same job at batch level and at trajectory level."""
    return [
        (
            Row(f"batch-{sigma:g}", sigma, {"mode": "async", "rollout": "batch"}),
            Row(f"trajectory-{sigma:g}", sigma, {"mode": "async"}),
        )
        for sigma in sigmas
    ]


def redundancy_rows(size: Size) -> tuple[Row, Row]:
    """Return the rows with a tail of environments, without and with a quarter more trajectories.

    In one trajectory in 25 a step takes ten times the mean longer; one in 33 has a fault, after
    which it restarts.
    """
    world = {"stalls": 0.04, "stall_seconds": 10 * MEAN_SECONDS * size.scale, "faults": 0.03}
    again = {"trajectory_retries": 2}
    spare = max(1, size.group_size // 4)
    return (
        Row("no-spare", 3.0, {"mode": "micro_batch"}, world, again),
        Row(
            "redundant",
            3.0,
            {"mode": "micro_batch", "redundant_trajectories": spare},
            world,
            again,
        ),
    )


def job(row: Row, size: Size, directory: Path) -> JobSpec:
    """Return the job of one row; save its tokenizer under `directory`."""
    vocabulary = save_tokenizer(directory / "tokenizer")
    redundant = row.pipeline.get("redundant_trajectories", 0)
    return JobSpec.model_validate(
        {
            "name": row.name,
            "workflow": "benchmarks.papers.trajectories.slow_worlds:play",
            "tasks": {
                "source": "benchmarks.papers.trajectories.slow_worlds:Worlds",
                "args": {
                    "row": row.name,
                    "turns": size.turns,
                    "seconds": MEAN_SECONDS * size.scale,
                    "sigma": row.sigma * size.scale,
                    **row.world,
                },
            },
            "agents": {AGENT: {"policy": "policy", "sampling": {"max_new_tokens": 150}}},
            "policies": {
                "policy": {
                    "model": {
                        # Never built: simulated policies only need a configuration's vocabulary.
                        "config": {
                            "model_type": "qwen3",
                            "vocab_size": vocabulary,
                            "eos_token_id": 1,
                        },
                        "tokenizer": str(directory / "tokenizer"),
                    },
                    "engine": {"max_running": 128, "max_context": 1024},
                    "simulated": PACE,
                }
            },
            "pipeline": {
                "steps": size.steps,
                "queries_per_step": size.queries_per_step,
                "group_size": size.group_size,
                "micro_batch_samples": 64,
                **row.pipeline,
            },
            "evaluation": {"queries": 0},
            "limits": {
                # One step's trajectories; free capacity goes to the next step, if it is open.
                "max_concurrent_trajectories": size.queries_per_step
                * (size.group_size + redundant),
                **row.limits,
            },
            "logging": {"tensorboard": False},
        }
    )
