"""Creates a model for a first run on the CPU, in seconds: `python -m examples.starter.model`.

It answers with either of the digits in the question. Name a real model in job.yaml, such as
Qwen/Qwen3-0.6B, when you have a GPU; this file is not needed then.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers.utils import logging

from troupe.demo.models import AnswerToLearn, make_model, make_tokenizer, train_step

STEPS, BATCH = 120, 64


def make(directory: Path, seed: int = 0) -> Path:
    """Save tokenizer and weights in `directory`."""
    torch.set_num_threads(1)  # more threads are slower for so small a model
    tokenizer = make_tokenizer()
    model = make_model("checker", tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(seed)
    for _ in range(STEPS):
        train_step(model, optimizer, tokenizer, [made_up(draw) for _ in range(BATCH)])
    logging.disable_progress_bar()
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def made_up(draw: random.Random) -> AnswerToLearn:
    """Return a question to either agent, with an answer drawn by chance."""
    digits = draw.sample("0123456789", 2)
    question = f"{digits[0]} or {digits[1]}?" + draw.choice(("", f" {draw.choice(digits)}"))
    return AnswerToLearn([{"role": "user", "content": question}], draw.choice(digits))


if __name__ == "__main__":
    print(make(Path("runs/models/starter")))
