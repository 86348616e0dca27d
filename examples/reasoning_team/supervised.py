"""The two things that a warm-start needs of a model: learn answers, give answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.reasoning_team.prompts import Message

MAX_NEW_TOKENS = 16
_GENERATE_BATCH = 160


@dataclass(frozen=True)
class Row:
    """A conversation and the answer to learn."""

    messages: list[Message]
    answer: str


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def train_step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
) -> float:
    """One cross-entropy step on the answers' tokens (and their end); returns the loss in nats."""
    prompts = [prompt_ids(tokenizer, row.messages) for row in rows]
    answers = [
        [*tokenizer(row.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for row in rows
    ]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    model.train()
    # Padding on the right: causal attention never looks at it.
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def answer_all(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]
) -> list[str]:
    """The model's greedy answers."""
    model.eval()
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    out = [""] * len(prompts)
    # Alike lengths together: less padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    greedy: Any = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for start in range(0, len(order), _GENERATE_BATCH):
        chosen = order[start : start + _GENERATE_BATCH]
        batch = tokenizer.pad(
            {"input_ids": [prompts[i] for i in chosen]}, padding_side="left", return_tensors="pt"
        )
        made = model.generate(**batch, generation_config=greedy)
        width = batch["input_ids"].shape[1]
        texts = tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            out[i] = text
    return out
