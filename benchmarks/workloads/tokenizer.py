"""A tokenizer of characters, for models that do not exist."""

from __future__ import annotations

import string
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
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        **({"eos_token": END} if ends else {"extra_special_tokens": [END]}),
        unk_token=UNKNOWN,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    return len(tokens)
