"""Adapters by PEFT itself over the tiny model, published as a trainer publishes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import PreTrainedModel

from tests.rollout.engines.models import make_model, policy_spec, publish_tensors
from troupe.checkpoints.adapters import AdapterContent, base_key, distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.job import LoraSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def lora_spec(*, rank: int = 4, **engine: object) -> PolicySpec:
    """A policy of the tiny model that trains an adapter."""
    lora = LoraSpec(rank=rank, alpha=2 * rank)
    return policy_spec(**engine).model_copy(update={"lora": lora})


class TrainedAdapter:
    """One policy's adapter over the base of `base_seed`, as the trainer's forward computes it."""

    def __init__(
        self,
        seed: int,
        *,
        base_seed: int = 0,
        rank: int = 4,
        dtype: torch.dtype = torch.float32,
        base: PreTrainedModel | None = None,
        targets: Sequence[str] = LAYERS,
    ) -> None:
        """`dtype`: the base's; an adapter is float32 (PEFT's own default). `base`: instead of
        the tiny model."""
        self.base = (base or make_model(base_seed)).to(dtype)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
        # Not made a second time: an engine's thread may draw from the same generator meanwhile.
        self.model: Any = get_peft_model(copy.deepcopy(self.base), config).eval()
        self.rank, self.targets = rank, targets
        self.step(seed)

    def step(self, seed: int, std: float = 0.2) -> None:
        """Other weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(std=std, generator=generator)

    def publish(
        self,
        transfer: Transfer,
        version: int,
        policy: str = "solver",
        job: str = "job",
        **changes: Any,
    ) -> common_pb.WeightsRef:
        """The base, and the adapter as `version`; `changes` are to what it says of itself."""
        named = CheckpointFormat(self.base, self.base.dtype).of(distinct_tensors(self.base))
        base = transfer.set("probe", named).checksum
        transfer.set(base_key(job, base), named)
        tensors = get_peft_model_state_dict(self.model)
        about: dict[str, Any] = {
            "base": base,
            "rank": self.rank,
            "alpha": 2.0 * self.rank,
            "target_modules": tuple(self.targets),
            "tensors": tensors,
            **changes,
        }
        return publish_tensors(transfer, AdapterContent(**about).to_tensors(), version, policy, job)

    def logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        """Log-probs of `response`, by PEFT's forward pass."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits, -1)
        chosen: list[float] = table.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        return chosen
