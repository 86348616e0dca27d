"""The work of both sides: tasks, reward, model, and their settings as a job and for TRL.

A task is a word of eight letters; the reward is the share of its letters in the model's response.
Nothing ends a response early, so that both sides draw the same number of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.workloads.tokenizer import save_tokenizer

AGENT: Final = "speaker"
TOKENS: Final = 16
# Types of products; bfloat16 by autocast, over weights and optimizers in float32.
DTYPES: Final = ("float32", "bfloat16")
_LETTERS: Final = 8


@dataclass(frozen=True)
class Size:
    """A Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    inner: int


# 3.2 million parameters, and a model that learns within a minute on one core.
LARGE: Final = Size(256, 4, 4, 768)
SMALL: Final = Size(64, 2, 4, 160)


@dataclass(frozen=True)
class Work:
    """The work of either side. A step is `queries` groups of `group` samples of `tokens` tokens."""

    steps: int
    seed: int = 0
    tasks: int = 256
    queries: int = 32
    group: int = 8
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 0.2
    max_grad_norm: float = 1.0
    dtype: str = DTYPES[0]

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.queries * self.group

    def lasting(self, steps: int) -> Work:
        """Return the same work with `steps` steps."""
        return replace(self, steps=steps)

    def as_dict(self) -> dict[str, Any]:
        """Return the work as JSON values."""
        return asdict(self)


def task(index: int) -> str:
    """Return the question of a task; the first 26^8 all differ."""
    # A multiplier without a common factor with 26^8 scatters neighbours over all words.
    number = (index * 77_777_777_777 + 1_234_567) % 26**_LETTERS
    letters = []
    for _ in range(_LETTERS):
        number, letter = divmod(number, 26)
        letters.append(chr(ord("a") + letter))
    return "".join(letters)


def reward(question: str, text: str) -> float:
    """Return the share of a response's `TOKENS` characters that occur in the question, in [0,
    1]."""
    return sum(letter in question for letter in text) / TOKENS


class Tasks:
    """The tasks as a job's source."""

    def __init__(self, split: str, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": task(index)}


async def speak(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Run all agents concurrently; reward each for its own answer."""
    question = query["question"]
    replies = await asyncio.gather(*(agents[name].chat(question) for name in agents))
    return {name: reward(question, reply.text) for name, reply in zip(agents, replies, strict=True)}


def faster_dtype(size: Size, *, tries: int = 20) -> str:
    """Return the type in which this machine trains faster: "bfloat16" if its product is at least
    twice as fast, as on a CPU with units for it (AMX), otherwise "float32"."""
    import torch

    left, right = torch.randn(1024, size.hidden), torch.randn(size.hidden, size.inner)
    seconds: dict[str, float] = {}
    for name in DTYPES:
        a, b = (t.to(getattr(torch, name)) for t in (left, right))
        took = []
        for _ in range(tries):
            began = time.perf_counter()
            torch.mm(a, b)
            took.append(time.perf_counter() - began)
        seconds[name] = min(took)
    return "bfloat16" if 2 * seconds["bfloat16"] < seconds["float32"] else "float32"


def save_model(directory: Path, size: Size, seed: int) -> Path:
    """Save random weights of `seed` and their tokenizer, in the format of `transformers`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary = save_tokenizer(directory, ends=False)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 2),
        head_dim=size.hidden // size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
