"""The jobs that every mode runs: five policies, a skewed team, simulated hardware, in two set-ups.

docs/benchmarks/pipeline.md explains the figures and their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.pipeline.research_team import AGENTS
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.job import JobSpec

TRAINERS: Final = 3
# Concurrent tool calls, each with a process of the reward service.
TOOL_PROCESSES: Final = 24

# One second here is about sixteen seconds of the papers' hardware. The following values are for a
# policy of 14B parameters; one of 32B prefills and trains 2.3 times slower and decodes 1.7 times
# slower.
SMALL: Final = {
    "prefill_tokens_per_second": 40_000.0,
    "decode_seconds": 0.00135,
    "decode_seconds_per_turn": 0.000022,
    "response_tokens_mean": 75.0,
    "response_tokens_sigma": 0.6,
    "backward_tokens_per_second": 12_700.0,
    "step_seconds": 0.05,
    "load_seconds": 0.05,
}
_LARGE_TRAINS: Final = 2.3
_LARGE_DECODES: Final = 1.7


@dataclass(frozen=True)
class Mode:
    """One row of a table: the settings in which it differs from the other rows."""

    name: str
    label: str
    stands_for: str
    pipeline: dict[str, Any]
    steps: int
    after: int = 0
    """Steps at the end that only keep the cluster busy while the measured ones overlap with
    them."""


@dataclass(frozen=True)
class Setup:
    """One table: the job that its rows share.

    `published`: the papers' ratios for this set-up, by the names of the JSON object
    (`micro_batch_over_sync`, ...).
    """

    name: str
    stands_for: str
    published: dict[str, float]
    queries_per_step: int
    in_flight: int
    micro_batch_samples: int
    tasks: dict[str, float]
    # Policies of 32B; they are bound to trainers like all others, in the order of names, each to
    # the least loaded one: coder and searcher share the first, critic and writer the second.
    large: tuple[str, ...] = ()
    small: dict[str, float] = field(default_factory=lambda: dict(SMALL))
    group_size: int = 4

    def simulated(self, policy: str) -> dict[str, float]:
        """Return the cost model of a policy."""
        if policy not in self.large:
            return self.small
        return self.small | {
            "prefill_tokens_per_second": self.small["prefill_tokens_per_second"] / _LARGE_TRAINS,
            "decode_seconds": self.small["decode_seconds"] * _LARGE_DECODES,
            "backward_tokens_per_second": self.small["backward_tokens_per_second"] / _LARGE_TRAINS,
        }


# 96 queries of 4 are 384 trajectories, of which 24 run at once: one in 16 as in the paper (64 of
# 1,024). A micro-batch has as many samples as one group, as in the paper.
MA: Final = Setup(
    name="ma",
    stands_for="FlexMARL MA: all agents of 14B, training takes as long as rollout",
    published={"micro_batch_over_serial": 7.3, "micro_batch_over_sync": 2.03},
    queries_per_step=96,
    in_flight=24,
    micro_batch_samples=4,
    tasks={"rounds": 1.33, "sigma": 0.3, "tool_seconds": 0.11, "tool_sigma": 1.0},
    small=SMALL | {"backward_tokens_per_second": 8_200.0},
)
CA: Final = Setup(
    name="ca",
    stands_for="FlexMARL CA: agents of 14B and 32B, long tails of tools",
    published={
        "micro_batch_over_serial": 5.6,
        "micro_batch_over_sync": 1.57,
        "async_over_sync": 2.05,  # RollArt's
    },
    queries_per_step=64,
    in_flight=32,
    micro_batch_samples=8,
    tasks={"rounds": 2.0, "sigma": 0.3, "tool_seconds": 0.11, "tool_sigma": 1.25},
    large=("critic", "searcher"),
)
SETUPS: Final = {one.name: one for one in (MA, CA)}


def quick(setup: Setup) -> Setup:
    """Return the set-up with a small step, which says little about speed."""
    return replace(setup, queries_per_step=12, in_flight=16)


def modes() -> list[Mode]:
    """Return the rows, slowest first.

    The first step is warm-up and not measured, except for `serial`, whose only step is long. The
    others measure the same three steps, since the contents of steps differ by some percent.
    """
    return [
        Mode("serial", "serial", "MAS-RL: colocated", {"mode": "serial"}, 1),
        Mode("sync", "sync", "DistRL, Sync", {"mode": "sync"}, 4),
        Mode("micro_batch", "micro_batch", "FlexMARL", {"mode": "micro_batch"}, 4),
        Mode("async", "async (alpha 1)", "RollArt, AReaL", {"mode": "async", "alpha": 1}, 5, 1),
    ]


def job(mode: Mode, setup: Setup, directory: Path) -> JobSpec:
    """Return the job of one row; save its tokenizer under `directory`."""
    vocabulary = save_tokenizer(directory / "tokenizer")
    model = {
        # Never built: simulated policies only need a configuration's vocabulary.
        "config": {"model_type": "qwen3", "vocab_size": vocabulary, "eos_token_id": 1},
        "tokenizer": str(directory / "tokenizer"),
    }
    return JobSpec.model_validate(
        {
            "name": f"pipeline-{setup.name}-{mode.name.replace('_', '-')}",
            "workflow": "benchmarks.papers.pipeline.research_team:play",
            "tasks": {
                "source": "benchmarks.papers.pipeline.research_team:Queries",
                "args": setup.tasks,
            },
            "tools": {"run": {"entrypoint": "benchmarks.papers.pipeline.research_team:run"}},
            "agents": {
                name: {"policy": name, "sampling": {"max_new_tokens": 600}} for name in AGENTS
            },
            "policies": {
                name: {
                    "model": model,
                    "engine": {"max_running": 64, "max_context": 1024},
                    "simulated": setup.simulated(name),
                }
                for name in AGENTS
            },
            "pipeline": {
                "steps": mode.steps,
                "queries_per_step": setup.queries_per_step,
                "group_size": setup.group_size,
                "micro_batch_samples": setup.micro_batch_samples,
                **mode.pipeline,
            },
            "evaluation": {"queries": 0},
            "limits": {"max_concurrent_trajectories": setup.in_flight},
            "logging": {"tensorboard": False},
        }
    )
