"""Creates a model that can learn this on one core: `python -m examples.coding_agent.tiny`.

Its tokenizer has one token for a whole function, which takes a real model many. The model only has
to learn which function a task requires.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.coding_agent.tasks import ASKED

FUNCTIONS = tuple(f"def solve(a, b):\n    return a {sign} b\n" for sign in "+-*/")
SPECIALS = ("<pad>", "<end>", "<user>", "<assistant>", "<unk>")
FAIL = "The tests fail."
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, the same every time."""
    words = [*SPECIALS, *FUNCTIONS, *ASKED.values(), FAIL]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    known = "|".join(re.escape(word) for word in words[len(SPECIALS) :])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{known}|[\\s\\S]"), "isolated")
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
    """Save tokenizer and random weights under `directory`."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.05,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/coding_agent"))
    print(make(parser.parse_args().out))
