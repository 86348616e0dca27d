"""Tiny models and their published weights for engine tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

VOCABULARY = 96
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def policy_spec(
    dtype: str = "float32", config: dict[str, Any] | None = None, **engine: object
) -> PolicySpec:
    """A policy of the tiny model, or of another one, in `dtype`; `engine` overrides fields of its
    engine section."""
    settings = {"max_running": 64, "max_context": 256, **engine}
    model = {"config": config or CONFIG, "tokenizer": "unused", "dtype": dtype}
    return PolicySpec(
        model=ModelSpec.model_validate(model),
        engine=EngineSpec.model_validate(settings),
    )


def make_model(seed: int) -> PreTrainedModel:
    """The tiny model with random weights of `seed`, on the plain attention path."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**CONFIG)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def publish(
    transfer: Transfer, model: torch.nn.Module, version: int, policy: str = "solver"
) -> common_pb.WeightsRef:
    """Set the model's weights as `version` and name them."""
    return publish_tensors(transfer, model.state_dict(), version, policy)


def publish_tensors(
    transfer: Transfer,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    policy: str = "solver",
    job: str = "job",
) -> common_pb.WeightsRef:
    """Set `tensors` as `version` and name them."""
    key = f"{job}/{policy}/weights@{version}"
    manifest = transfer.set(key, tensors)
    return common_pb.WeightsRef(
        job_id=job,
        policy=policy,
        version=version,
        key=key,
        checksum=manifest.checksum,
        num_bytes=manifest.num_bytes,
    )


def transfer_in(directory: Path) -> Transfer:
    """A transfer of this test's own."""
    return Transfer(directory / "transfer")


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of `response` after `prompt` from one plain forward pass."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    table = torch.log_softmax(logits, dim=-1)
    chosen: list[float] = table.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1).tolist()
    return chosen


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int = 8) -> list[int]:
    """The most likely tokens after `prompt`, by plain forward passes."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
