"""A job of one policy whose samples a benchmark makes itself, and models for it."""

from __future__ import annotations

from typing import Any

from troupe.job import JobSpec


def job_of_one(
    name: str, policy: dict[str, Any], *, solver: str = "solver", **fields: Any
) -> JobSpec:
    """Return the job `name` of one agent and its policy, both named `solver`; nobody plays its
    workflow. `fields` of the job, `pipeline` among them, are taken as given."""
    return JobSpec.model_validate(
        {
            "name": name,
            "workflow": "nowhere:play",
            "tasks": {"source": "nowhere:tasks"},
            "agents": {solver: {"policy": solver}},
            "policies": {solver: policy},
            **fields,
        }
    )


def tied_qwen3(hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a Qwen3 with tied embeddings and as many heads of keys as of
    queries."""
    return {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
