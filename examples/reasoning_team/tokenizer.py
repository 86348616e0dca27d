"""The project's own tokenizer: characters, and the fixed phrases of the questions as single tokens.

It is an ordinary `PreTrainedTokenizerFast` with a chat template, so the workflow talks to it as to
any other; small models just should not spend their few layers on reading boilerplate.
"""

from __future__ import annotations

import re
import string
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD: Final = "<pad>"
END: Final = "<end>"
USER: Final = "<user>"
ASSISTANT: Final = "<assistant>"
UNKNOWN: Final = "<unk>"
SPECIALS: Final = (PAD, END, USER, ASSISTANT, UNKNOWN)

PHRASES: Final = (
    "spell backward: ",
    "rotate 90 degrees:",
    "rotate 180 degrees:",
    "rotate 270 degrees:",
    "horizontally mirror the matrix:",
    "vertically mirror the matrix:",
    "mirror the matrix along the diagonal:",
    "mirror the matrix along the counterdiagonal:",
    "\nanswer: ",
)
CHARACTERS: Final = "\n " + string.ascii_lowercase + string.digits + string.punctuation

TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<end>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build it; the same every time."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS, *PHRASES])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    longest_first = sorted(PHRASES, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
