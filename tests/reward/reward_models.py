"""Models as rewards, as users would write them. Tiny, with a fixed seed, on any device."""

from __future__ import annotations

from typing import Any

import torch


class Linear:
    """The least that is a model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def score(self, features: list[float]) -> Any:
        weight: Any = self.net[0].weight
        return self.net(torch.tensor(features, device=weight.device, dtype=weight.dtype)).squeeze()


class Judge:
    """A transformers model with a head for scores, and weights that are tied."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2ForSequenceClassification

        torch.manual_seed(1)
        config = GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            num_labels=1,
            eos_token_id=None,
        )
        config.pad_token_id = 0
        self.model = GPT2ForSequenceClassification(config).eval()

    def score(self, ids: list[int]) -> Any:
        device = next(self.model.parameters()).device
        return self.model(torch.tensor([ids], device=device)).logits.float().squeeze()
