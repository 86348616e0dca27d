"""The job that every mode runs: five policies, a skewed team, paced hardware.

What the figures stand for, and where they come from, is in docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.workloads.research_team import AGENTS
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.job import JobSpec

TRAINERS: Final = 3
# Tool calls at once: each has a process of the reward service.
TOOL_PROCESSES: Final = 24


@dataclass(frozen=True)
class Mode:
    """One row of the table: what differs from the other rows, and nothing else does."""

    name: str
    label: str
    stands_for: str
    pipeline: dict[str, Any]
    steps: int


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    queries_per_step: int
    group_size: int
    in_flight: int


FULL: Final = Size(queries_per_step=64, group_size=4, in_flight=32)
QUICK: Final = Size(queries_per_step=12, group_size=4, in_flight=16)

# One second here is about twelve of the papers' hardware. Three policies are of 14B parameters,
# two of 32B: these read and train 2.3 times slower and decode 1.7 times slower.
SMALL: Final = {
    "prefill_tokens_per_second": 30_000,
    "decode_seconds": 0.0018,
    "decode_seconds_per_turn": 0.00003,
    "response_tokens_mean": 75,
    "response_tokens_sigma": 0.6,
    "backward_tokens_per_second": 9_500,
    "step_seconds": 0.07,
    "load_seconds": 0.07,
}
LARGE: Final = SMALL | {
    "prefill_tokens_per_second": 13_000,
    "decode_seconds": 0.003,
    "backward_tokens_per_second": 4_100,
}
# Policies are bound to trainers in the order of their names, each to the least loaded one: coder
# and searcher share the first, critic and writer the second, the planner has the third.
LARGE_ONES: Final = ("critic", "searcher")
TASKS: Final = {"rounds": 2.0, "sigma": 0.3, "tool_seconds": 0.15, "tool_sigma": 1.25}


def modes(quick: bool) -> list[Mode]:
    """The rows, slowest first. The first step of each is warm-up and not measured."""
    long, short = (3, 2) if quick else (5, 2)
    return [
        Mode("serial", "serial", "MAS-RL: colocated", {"mode": "serial"}, short),
        Mode("sync", "sync", "DistRL, Sync", {"mode": "sync"}, long),
        Mode("micro_batch", "micro_batch", "FlexMARL", {"mode": "micro_batch"}, long),
        Mode("async", "async (alpha 1)", "RollArt, AReaL", {"mode": "async", "alpha": 1}, long + 2),
    ]


def job(mode: Mode, size: Size, directory: Path) -> JobSpec:
    """The job of one row; its tokenizer is put under `directory`."""
    vocabulary = save_tokenizer(directory / "tokenizer")
    model = {
        # Never built: paced policies need a configuration's vocabulary only.
        "config": {"model_type": "qwen3", "vocab_size": vocabulary, "eos_token_id": 1},
        "tokenizer": str(directory / "tokenizer"),
    }
    return JobSpec.model_validate(
        {
            "name": f"pipeline-{mode.name.replace('_', '-')}",
            "workflow": "benchmarks.workloads.research_team:play",
            "tasks": {"source": "benchmarks.workloads.research_team:Queries", "args": TASKS},
            "tools": {"run": {"entrypoint": "benchmarks.workloads.research_team:run"}},
            "agents": {
                name: {"policy": name, "sampling": {"max_new_tokens": 600}} for name in AGENTS
            },
            "policies": {
                name: {
                    "model": model,
                    "engine": {"max_running": 64, "max_context": 1024},
                    "paced": LARGE if name in LARGE_ONES else SMALL,
                }
                for name in AGENTS
            },
            "pipeline": {
                "steps": mode.steps,
                "queries_per_step": size.queries_per_step,
                "group_size": size.group_size,
                "micro_batch_samples": 8,
                **mode.pipeline,
            },
            "evaluation": {"queries": 0},
            "limits": {"max_concurrent_trajectories": size.in_flight},
            "logging": {"tensorboard": False},
        }
    )
