"""Creates a model that can learn this on one core: `python -m examples.existing_agent.tiny`.

Its tokenizer has one token for a whole call of the tool, which takes a real model many. A few
seconds of supervised training teach it the format; it then uses the tool half of the time and
trusts the result half of the time.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.existing_agent.agent import QUESTION
from examples.existing_agent.tasks import LETTERS

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
STEPS, BATCH = 200, 64
LOOKS, KNOWS = 0.5, 0.4
"""How often the made-up runs look, and then answer with the letter that they saw."""

SPECIALS = ("<pad>", "<end>", "<user>", "<assistant>", "<result>", "<tools>", "<unk>")
# The template writes messages as tokens. The tools are always the same: one token marks them.
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<assistant>{{ m.content }}"
    "{% if m.tool_calls %}" + CALL + "{% endif %}<end>"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}"
    "{% elif m.role == 'user' %}<user>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, the same every time."""
    words = [*SPECIALS, CALL, QUESTION, *LETTERS]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    pattern = "|".join([re.escape(CALL), re.escape(QUESTION), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[2:6]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make(directory: Path, seed: int = 0) -> Path:
    """Save tokenizer and weights under `directory`."""
    tokenizer = make_tokenizer()
    torch.set_num_threads(1)  # more threads are slower for so small a model on a busy machine
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.05,
            # A short rotary base: the model looks one token back.
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    teach_format(model, tokenizer, random.Random(seed))
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def teach_format(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> None:
    """Train supervised on made-up runs of the agent, whose answers are right only by chance."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        texts = [_made_up_run(draw) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _made_up_run(draw: random.Random) -> str:
    found, answer = draw.choice(LETTERS), draw.choice(LETTERS)
    if draw.random() < KNOWS:
        answer = found
    looked = f"{CALL}<end><result>{found}<assistant>" if draw.random() < LOOKS else ""
    return f"<tools><user>{QUESTION}<assistant>{looked}{answer}<end>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/existing_agent"))
    print(make(parser.parse_args().out))
