"""Makes the small random model that the jobs of this example begin with.

    python -m examples.self_play.model --out runs/models/self_play

Its vocabulary is cards, moves and the marks of a conversation. Any other chat model does as well:
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
    """A token per card and per move; the same every time."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CARDS, *MOVES])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return chat_tokenizer(core)


def make_player(directory: Path, *, seed: int = 0) -> Path:
    """Save a random Qwen3 with that tokenizer in `directory`."""
    return make_model(directory, make_tokenizer(), positions=64, seed=seed)


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/models/self_play"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_player(args.out, seed=args.seed))


if __name__ == "__main__":
    main()
