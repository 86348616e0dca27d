"""The modes on real engines and trainers: their learning, and its bitwise equality."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.pipeline.measure import step_ends
from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.client import AsyncClient, JobFailed
from troupe.contracts import metric_names
from troupe.job import JobSpec

POLICIES: Final = ("checker", "solver")


@dataclass(frozen=True)
class Lesson:
    """The result of one job: team reward per step, and the checksum of each policy's last weights.

    `failure`: the reason if there is no result.
    """

    mode: str
    rewards: list[float]
    checksums: dict[str, str]
    failure: str = ""


def job(mode: str, steps: int, directory: Path) -> JobSpec:
    """Return the job of a tiny team on embedded engines, deterministic if the mode supports it."""
    letters = string.ascii_lowercase[:12] + " ?"
    vocabulary = save_tokenizer(directory / "letters", letters)
    model = {
        "config": {
            "model_type": "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        "tokenizer": str(directory / "letters"),
    }
    pipeline: dict[str, Any] = {
        "mode": mode,
        "steps": steps,
        "queries_per_step": 4,
        "group_size": 8,
        "micro_batch_samples": 16,
        "deterministic": mode != "async",
    }
    return JobSpec.model_validate(
        {
            "name": f"equality-{mode.replace('_', '-')}",
            "workflow": "benchmarks.papers.pipeline.letter_team:play",
            "tasks": {"source": "benchmarks.papers.pipeline.letter_team:Queries"},
            "agents": {n: {"policy": n, "sampling": {"max_new_tokens": 6}} for n in POLICIES},
            "policies": {
                name: {"model": model, "optimizer": {"lr": 0.01}, "engine": {"max_context": 128}}
                for name in POLICIES
            },
            "pipeline": pipeline,
            "evaluation": {"queries": 0},
            "logging": {"tensorboard": False},
        }
    )


async def learn(client: AsyncClient, mode: str, spec: JobSpec) -> Lesson:
    """Train to the end; return the lesson."""
    handle = await client.submit(spec)
    rewards = [step.values[metric_names.TEAM_MEAN] for step in await step_ends(handle)]
    try:
        await handle.result(timeout=60)
    except JobFailed as error:
        return Lesson(mode, [], {}, str(error))
    checksums = {}
    for policy in POLICIES:
        newest = max(await handle.versions(policy), key=lambda version: version.version)
        checksums[policy] = newest.checksum
    return Lesson(mode, rewards, checksums)
