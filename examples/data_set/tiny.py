"""Creates a model that can learn this on one core: `python -m examples.data_set.tiny`.

A few seconds of supervised training teach it to answer with either of the two digits in the
question.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = ("<pad>", "<end>", "<user>", "<assistant>", "<unk>")
LETTERS = "0123456789 or?"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEPS, BATCH = 150, 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each letter, the same every time."""
    words = [*SPECIALS, *dict.fromkeys(LETTERS)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[2:4]),
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
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.05,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        texts = [_made_up_reply(draw) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def _made_up_reply(draw: random.Random) -> str:
    one, other = draw.sample("0123456789", 2)
    return f"<user>{one} or {other}?<assistant>{draw.choice((one, other))}<end>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/data_set"))
    print(make(parser.parse_args().out))
