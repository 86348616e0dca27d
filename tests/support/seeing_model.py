"""A tiny model that reads payloads, of a type that transformers knows where this is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.training import VOCABULARY, tiny_config
from troupe.contracts.payloads import Payload, Payloads

KIND = "bytes/test"
STAND_IN = 7
TOKENS = 40


def stand_ins(payload: Payload) -> Sequence[int]:
    """Tokens that stand for a payload in a prompt."""
    return [STAND_IN] * min(TOKENS, len(payload.data))


def payload(number: int, size: int = TOKENS) -> Payload:
    """Return a payload of random bytes."""
    data = np.random.default_rng(number).integers(1, VOCABULARY, size).astype(np.uint8)
    return Payload(KIND, "application/octet-stream", data.tobytes())


def seeing_config() -> dict[str, Any]:
    """Return the `model.config` of a job."""
    return {**tiny_config(), "model_type": SeeingConfig.model_type}


class SeeingConfig(Qwen3Config):
    """A type of its own, by which transformers finds the model."""

    model_type = "seeing_qwen3"


class Lens(torch.nn.Module):
    """The part of the model that only payloads pass through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turn = torch.nn.Linear(width, width, bias=False)

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        """Return what is seen of embedded bytes [..., d]."""
        return shown + torch.tanh(self.turn(shown))


class SeeingModel(Qwen3ForCausalLM):
    """A model for which each token of a payload is one of its bytes, seen through a lens.

    FSDP gathers the lens by itself, so that all ranks must use it in the same passes.
    """

    config_class = SeeingConfig
    payload_kinds = frozenset({KIND})
    _no_split_modules = ("Qwen3DecoderLayer", "Lens")

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.lens = Lens(config.hidden_size)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        payloads: Payloads | None = None,
        **how: Any,
    ) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        if payloads is None:
            return super().forward(inputs_embeds=embedded, **how)
        seen = torch.zeros(embedded.shape[0] * embedded.shape[1], dtype=torch.long)
        for placed in payloads:
            values = np.frombuffer(placed.payload.data[: placed.tokens], np.uint8).astype(np.int64)
            end = placed.position + placed.tokens
            seen[placed.position : end] = torch.from_numpy(values % VOCABULARY)
        shown = self.lens(self.get_input_embeddings()(seen)).reshape(embedded.shape)
        mask = (seen > 0).reshape(*embedded.shape[:2], 1)
        return super().forward(inputs_embeds=torch.where(mask, shown, embedded), **how)


AutoConfig.register(SeeingConfig.model_type, SeeingConfig)
AutoModelForCausalLM.register(SeeingConfig, SeeingModel)
