"""The reward `reward_model`: the score of a sequence classification model with one output.

It accepts any checkpoint that `AutoModelForSequenceClassification` of transformers loads, such as
reward models from the hub or from TRL's RewardTrainer. Each worker process that runs its calls
loads the model once, on a GPU if the process sees one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

from troupe.functions.declaration import reward
from troupe.functions.library.answers import rewarded


class RewardModelError(Exception):
    """There is no score. `kind`: "no_model", "wrong_head", "no_template", "no_reply" or
    "not_finite"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class SequenceScorer:
    """A sequence classification model with one output, and its tokenizer."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        """Load both from a directory or a hub id. Raises `RewardModelError`."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from troupe.chat_templates.chat import ChatTemplates

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
        cuda = torch.cuda.is_available()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                path, revision=revision, dtype="auto" if cuda else torch.float32
            )
        except Exception as error:
            raise RewardModelError("no_model", f"{path} cannot be loaded: {error}") from error
        outputs = int(self._model.config.num_labels)
        if outputs != 1:
            text = f"{path} has {outputs} outputs; a reward model must have one (`num_labels: 1`)"
            raise RewardModelError("wrong_head", text)
        if self._tokenizer.chat_template is None:
            raise RewardModelError("no_template", f"the tokenizer of {path} has no chat template")
        self._templates = ChatTemplates(self._tokenizer)
        self._model.eval().to("cuda" if cuda else "cpu")

    def score(self, messages: Sequence[dict[str, Any]], max_tokens: int = 0) -> float:
        """Return the model's output for a conversation; it reads at most the last `max_tokens`
        tokens (0: all)."""
        import torch

        text = self._templates.render(list(messages))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([ids[-max_tokens:] if max_tokens else ids], device=self._model.device)
        with torch.inference_mode():
            # The mask is full: a single row has no padding, even if its last token is the padding
            # token.
            output = self._model(input_ids=inputs, attention_mask=torch.ones_like(inputs))
        return float(output.logits[0, 0])


@functools.lru_cache(maxsize=2)
def scorer(path: str, revision: str | None = None) -> SequenceScorer:
    """Return the scorer of a model, loaded once in a process. Raises `RewardModelError`."""
    return SequenceScorer(path, revision)


@reward(cores=1, timeout_seconds=300, memory_mib=0)
def reward_model(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    model: str,
    revision: str | None = None,
    squash: bool = False,
    max_tokens: int = 0,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return the model's score for the last reply of `agent`, or of the trajectory, given the
    messages before it; `squash`: its sigmoid. Raises `RewardModelError`."""
    turn = next((one for one in reversed(turns) if agent in ("", one["agent"])), None)
    if turn is None:
        raise RewardModelError("no_reply", f"agent {agent!r} has no reply")
    whole = [*turn["messages"], {"role": "assistant", "content": turn["response"]}]
    value = scorer(model, revision).score(whole, max_tokens)
    if not math.isfinite(value):
        raise RewardModelError("not_finite", f"{model} gives {value}")
    if squash:
        # Computed with the smaller exponential, which cannot overflow.
        small = math.exp(-abs(value))
        value = 1 / (1 + small) if value >= 0 else small / (1 + small)
    return rewarded(value, agent, weight)
