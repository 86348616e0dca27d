"""The measured jobs: a real tiny model, and simulated engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.workloads.tokenizer import save_tokenizer
from troupe.job import JobSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

POLICY: Final = "player"
JOB: Final = "bench"
# About 1.3 million parameters, a typical size for an embedded engine.
_MODEL: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    # Every response has the maximum length, so that both sides draw the same tokens.
    "eos_token_id": None,
    "bos_token_id": None,
}
RESPONSE: Final = 64
TURNS: Final = 4
WORDS: Final = 8
MAX_RUNNING: Final = 64

# A step is long enough that a trajectory's turns take seconds, as in real jobs.
STEP_SECONDS: Final = 0.02
SIMULATED: Final[dict[str, Any]] = {
    # The model time of a turn is its tokens times a step, regardless of other turns.
    "decode_seconds": STEP_SECONDS,
    "decode_seconds_per_turn": 0.0,
    "prefill_tokens_per_second": 1e12,
    "response_tokens_mean": 100,
    "response_tokens_sigma": 0.6,
    "load_seconds": 0.0,
}


def model(directory: Path) -> dict[str, Any]:
    """Return the policy's `model` section; save its tokenizer under `directory`."""
    return {
        # No token ends a response, so that both sides draw and prefill the same number of tokens.
        "config": _MODEL | {"vocab_size": save_tokenizer(directory / "tokenizer", ends=False)},
        "tokenizer": str(directory / "tokenizer"),
    }


def spec(directory: Path, workflow: str, policy: dict[str, Any], **sections: Any) -> JobSpec:
    """Return a job whose trajectories consist of turns only."""
    args = sections.pop("args", {})
    tokens = sections.pop("max_new_tokens", RESPONSE)
    module = sections.pop("module", "benchmarks.workloads.plain_turns")
    return JobSpec.model_validate(
        {
            "name": JOB,
            "workflow": f"{module}:{workflow}",
            "tasks": {"source": f"{module}:Queries", "args": args},
            "agents": {POLICY: {"policy": POLICY, "sampling": {"max_new_tokens": tokens}}},
            "policies": {POLICY: {"model": model(directory), **policy}},
            "pipeline": {"steps": 1, "queries_per_step": 1},
            **sections,
        }
    )


def embedded(directory: Path, in_flight: int) -> JobSpec:
    """Return a job of single turns of 32 to 96 tokens by the real model."""
    return spec(
        directory,
        "ask",
        {
            "engine": {"max_running": MAX_RUNNING, "max_context": 512},
        },
        args={"turns": TURNS, "words": WORDS, "response": RESPONSE},
        limits={"max_concurrent_trajectories": in_flight},
    )


def simulated(directory: Path, workflow: str, in_flight: int, turns: int) -> JobSpec:
    """Return a job with four simulated engines with room for all trajectories at once: nothing
    waits."""
    return spec(
        directory,
        workflow,
        {
            "engine": {"replicas": 4, "max_running": -(-in_flight // 4), "max_context": 16_384},
            "simulated": SIMULATED,
        },
        args={"turns": turns, "words": WORDS, "step_seconds": STEP_SECONDS},
        max_new_tokens=600,
        limits={"max_concurrent_trajectories": in_flight},
    )


def publish(directory: Path, job: JobSpec) -> common_pb.WeightsRef:
    """Publish random weights of the job's model, or a few bytes if nothing computes with them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = job.policies[POLICY]
    if policy.simulated is not None:
        tensors = {"nothing": torch.zeros(1)}
    else:
        assert policy.language_model.config is not None
        torch.manual_seed(0)
        config = AutoConfig.for_model(**policy.language_model.config)
        tensors = dict(AutoModelForCausalLM.from_config(config).state_dict())
    key = f"{JOB}/{POLICY}/weights@0"
    manifest = Transfer(directory / "transfer").set(key, tensors)
    return common_pb.WeightsRef(
        job_id=JOB, policy=POLICY, version=0, key=key, checksum=manifest.checksum
    )
