"""Tokenizers of characters and of made-up words, for models that do not exist."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD: Final = "<pad>"
END: Final = "<end>"
UNKNOWN: Final = "<unk>"
_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def save_tokenizer(
    directory: Path, characters: str = string.printable, *, ends: bool = True
) -> int:
    """Save one for `characters` under `directory`; return the size of its vocabulary.

    Token 0 is padding, token 1 ends a message and, with `ends`, a response.
    """
    tokens = [PAD, END, UNKNOWN, *sorted(characters)]
    core = _words(tokens)
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    _save(core, directory, ends=ends)
    return len(tokens)


def save_word_tokenizer(directory: Path, vocabulary: int) -> int:
    """Save one of `vocabulary` tokens: the words "w0", "w1", ... and three special tokens. A text
    that a model writes has as many tokens when it is read. Returns the number of words."""
    words = vocabulary - len((PAD, END, UNKNOWN))
    core = _words([PAD, END, UNKNOWN, *(f"w{number}" for number in range(words))])
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _save(core, directory, ends=True)
    return words


def _words(tokens: Sequence[str]) -> Tokenizer:
    ids = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))


def _save(core: Tokenizer, directory: Path, *, ends: bool) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        **({"eos_token": END} if ends else {"extra_special_tokens": [END]}),
        unk_token=UNKNOWN,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
