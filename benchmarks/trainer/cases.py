"""The models and batches of both sides.

Random tokens, and random weights or a checkpoint's: an update's time and memory depend only on
shapes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk in the format of transformers."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The configuration in the form of transformers."""
        found: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        return found

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self.config["vocab_size"])


@dataclass(frozen=True)
class Model:
    """A Qwen3 with tied embeddings."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    inner: int

    @property
    def config(self) -> dict[str, Any]:
        """The configuration in the form of transformers."""
        return {
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 2),
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class Case:
    """One step: groups of answers to a prompt each."""

    name: str
    model: Model | Checkpoint
    groups: int
    members: int
    # Tokens of a prompt, uniform between these.
    prompt: tuple[int, int]
    # Tokens of an answer: all equal, or log-normal with this mean, cut at `longest`.
    mean: int
    longest: int

    @property
    def heavy(self) -> bool:
        """Whether rows differ in length."""
        return self.longest > self.mean

    def rows(self) -> list[tuple[Ints, int, int]]:
        """Return (tokens, length of the prompt, group) of each sample."""
        rng = np.random.default_rng(0)
        found = []
        for group in range(self.groups):
            prompt = rng.integers(self.model.vocabulary, size=rng.integers(*self.prompt) + 1)
            for _ in range(self.members):
                length = self.mean
                if self.heavy:  # sigma 1: the longest are five to nine times the mean
                    length = int(rng.lognormal(np.log(self.mean) - 0.5, 1.0))
                    length = min(max(length, 2), self.longest)
                answer = rng.integers(self.model.vocabulary, size=length)
                found.append((np.concatenate([prompt, answer]), len(prompt), group))
        return found

    def advantages(self) -> list[float]:
        """Return each sample's advantage; none is zero, so that none may be left out."""
        return [1.0 if number % 2 else -1.0 for number in range(self.groups * self.members)]


# 3.2 million parameters, and 11 million of which 8 are embeddings.
SMALL: Final = Model(vocabulary=512, hidden=256, layers=4, heads=4, inner=768)
WIDE: Final = Model(vocabulary=32_000, hidden=256, layers=4, heads=4, inner=768)
TINY: Final = Model(vocabulary=64, hidden=32, layers=2, heads=2, inner=64)

CASES: Final = (
    Case("answers of all lengths", SMALL, 8, 8, (16, 128), mean=64, longest=512),
    Case("answers of all lengths, 32k tokens", WIDE, 4, 8, (16, 128), mean=64, longest=512),
    Case("all alike", SMALL, 8, 8, (64, 65), mean=96, longest=96),
    Case("all alike, 32k tokens", WIDE, 4, 8, (64, 65), mean=96, longest=96),
)
QUICK: Final = (
    Case("answers of all lengths", TINY, 2, 4, (4, 24), mean=12, longest=80),
    Case("all alike", TINY, 2, 4, (8, 9), mean=16, longest=16),
)


def cases_of(size: str) -> dict[str, Case]:
    """Return the cases by name; `size`: "full", "quick", or the directory of a checkpoint."""
    if size in ("full", "quick"):
        return {case.name: case for case in (CASES if size == "full" else QUICK)}
    model = Checkpoint(Path(size))
    cases = (
        Case("answers of all lengths", model, 2, 8, (16, 128), mean=64, longest=512),
        Case("all alike", model, 2, 8, (64, 65), mean=96, longest=96),
    )
    return {case.name: case for case in cases}


def load(case: Case) -> Any:
    """Load the case's model in float32, the same on both sides."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(case.model, Checkpoint):
        return AutoModelForCausalLM.from_pretrained(case.model.path, dtype=torch.float32)
    torch.manual_seed(0)
    config = dict(case.model.config)
    kind = config.pop("model_type")
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **config), dtype=torch.float32
    )
