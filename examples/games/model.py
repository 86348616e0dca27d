"""Creates the small random model with which the examples' jobs begin.

    python -m examples.games.model --out runs/models/games

Its tokenizer knows the words of the games, so that a move is one token. Any other chat model
also works: point `policies.<name>.model.path` at it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.games import kuhn, stag_hunt
from troupe.demo.models import SPECIALS, UNKNOWN, chat_tokenizer

_WORD: Final = r"\w+|[^\w]"
_SPOKEN: Final = "You hold the. They. Go. Legal moves: That is no legal move. stag, hare.\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token per word, digit string and mark, the same every time."""
    texts = [kuhn.RULES, *kuhn.CARDS, *kuhn.MOVES, stag_hunt.StagHunt().properties.rules, _SPOKEN]
    words = dict.fromkeys(re.findall(_WORD, " ".join(texts).lower()))
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "isolated")
    core.decoder = decoders.Fuse()
    return chat_tokenizer(core)


def make_model(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    positions: int = 256,
    seed: int = 0,
) -> Path:
    """Save a random Qwen3 of two layers with a tokenizer (default: the games') in `directory`."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return directory


def main() -> None:
    """Create the model in the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/games"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.out, seed=args.seed))


if __name__ == "__main__":
    main()
