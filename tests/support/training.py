"""A tiny policy, its tokenizer, and rollouts of it, for trainer tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from troupe import tensors
from troupe.job import JobSpec
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

VOCABULARY = 64


def save_tokenizer(directory: Path, size: int = VOCABULARY) -> Path:
    """One token per character; `size` tokens."""
    vocabulary = {chr(33 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='"', unk_token="!")
    fast.save_pretrained(directory)
    return directory


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 of two layers."""
    return {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        **changes,
    }


def make_spec(
    tokenizer: Path,
    *,
    model: dict[str, Any] | None = None,
    policies: Sequence[str] = ("solver",),
    frozen: Sequence[str] = (),
    optimizer: dict[str, Any] | None = None,
    **sections: Any,
) -> JobSpec:
    """Return a job with tiny policies; `sections` replace the specification's."""
    source = model or {"config": tiny_config(), "tokenizer": str(tokenizer)}
    names = [*policies, *frozen]
    values: dict[str, Any] = {
        "name": "test",
        "workflow": "nowhere:play",
        "tasks": {"source": "nowhere:tasks"},
        "agents": {name: {"policy": name} for name in names},
        "policies": {
            name: {
                "model": source,
                "trainable": name not in frozen,
                "optimizer": {"lr": 1e-2, **(optimizer or {})},
            }
            for name in names
        },
        "pipeline": {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4},
        **sections,
    }
    return JobSpec.model_validate(values)


@torch.no_grad()
def score(model: Any, ids: Sequence[int], prompt_length: int) -> np.ndarray[Any, Any]:
    """Log-probs of a response, computed plainly; float32 [response_len]."""
    inputs = torch.tensor([list(ids)], device=next(model.parameters()).device)
    logp = torch.log_softmax(model(inputs).logits[0, :-1].float(), -1)
    chosen = logp.gather(1, inputs[0, 1:, None])[:, 0]
    array: np.ndarray[Any, Any] = chosen[prompt_length - 1 :].cpu().numpy()
    return array


@torch.no_grad()
def log_prob_table(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs of every token where `tokens` were drawn, float64 [len(tokens), vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)


def rounding(model: Any, exact: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """The largest error of a log-prob that the type of `model` explains: how far it is from
    `exact`, the same model in float64, by plain passes.

    Half precision rounds otherwise on every CPU: a tolerance in nats that holds on one is too small
    for the next. What computes in another order may be off by as much, on the other side.
    """
    off = log_prob_table(model, prompt, tokens) - log_prob_table(exact, prompt, tokens)
    return float(off.abs().max())


def make_rollout(
    query: str,
    trajectory: str,
    *,
    policy: str = "solver",
    turn: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    response: Sequence[int] = (8, 9),
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    version: int = 0,
) -> store_pb.Sample:
    """One sample as rollout appends it."""
    scores = [-4.0] * len(response) if logprobs is None else list(logprobs)
    return store_pb.Sample(
        sample_id=f"{query}_{turn}_{trajectory}",
        policy=policy,
        query_id=query,
        trajectory_id=trajectory,
        agent=policy,
        turn=turn,
        group_id=f"{query}/{policy}",
        prompt_ids=tensors.to_proto(np.array(prompt, np.int32)),
        response_ids=tensors.to_proto(np.array(response, np.int32)),
        logprobs=tensors.to_proto(np.array(scores, np.float32)),
        versions=[common_pb.VersionSpan(version=version, start=0, end=len(response))],
        reward=reward,
        finish_reason="stop",
    )
