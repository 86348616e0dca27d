"""Creates the small random model with which the jobs of this example begin.

    python -m examples.self_play.model --out runs/models/self_play

Its vocabulary is cards, moves and the marks of a conversation. Any other chat model also works:
point `policies.player.model.path` at it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.games.kuhn import CARDS, MOVES
from examples.games.model import make_model
from troupe.demo.models import SPECIALS, UNKNOWN, chat_tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token per card and move, the same every time."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CARDS, *MOVES])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return chat_tokenizer(core)


def make_player(directory: Path, *, seed: int = 0) -> Path:
    """Save a random Qwen3 with that tokenizer in `directory`."""
    return make_model(directory, make_tokenizer(), positions=64, seed=seed)


def main() -> None:
    """Create the model in the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/self_play"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_player(args.out, seed=args.seed))


if __name__ == "__main__":
    main()
