"""Small models that recipes begin with: tokenizers of whole words, and warm starts by supervised
steps, which give a first policy the success rate that a recipe needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from troupe.demo.models import SPECIALS, UNKNOWN, AnswerToLearn, chat_tokenizer, train_step


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of conversations whose tokens are `words`, separated by spaces."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return chat_tokenizer(core)


def warm_start(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    rows: Callable[[], list[AnswerToLearn]],
    *,
    steps: int,
    lr: float,
    final_lr_fraction: float = 1.0,
) -> None:
    """Teach the model that is saved in `directory` the answers of `rows`, which is called for each
    step; the learning rate falls linearly to `final_lr_fraction` of `lr`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    cooled = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final_lr_fraction, steps)
    for _ in range(steps):
        train_step(model, optimizer, tokenizer, rows())
        cooled.step()
    model.save_pretrained(directory)
