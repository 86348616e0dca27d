"""Makes the small random model that the jobs of this example begin with.

    python -m examples.self_play.model --out runs/models/self_play

Its vocabulary is cards, moves and the marks of a conversation. Any other chat model does as well:
point `policies.player.model.path` at it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.games.kuhn import CARDS, MOVES
from examples.games.model import ASSISTANT, END, PAD, TEMPLATE, UNKNOWN, USER


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per card and per move; the same every time."""
    specials = [PAD, END, USER, ASSISTANT, UNKNOWN]
    vocabulary = {token: i for i, token in enumerate([*specials, *CARDS, *MOVES])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(directory: Path, *, hidden: int = 48, layers: int = 2, seed: int = 0) -> Path:
    """Save a random Qwen3 with that tokenizer under `directory`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return directory


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/self_play"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.out, seed=args.seed))


if __name__ == "__main__":
    main()
