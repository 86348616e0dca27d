"""A long text read in segments between special tokens has the ids of the whole text."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.workflow.stage import CHATML, make_chat
from troupe.workflow import ChatTokenizer, conversation
from troupe.workflow.conversation import PLAIN

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b"), ("b", "Ġ"), ("\u2581", "a")]
# Long and short ones, one within another, one that ends as another begins.
_MARKS = ("<|im_start|>", "<|im_end|>", "<|im", "|>a", "<t>", "</t>")


def _byte_level(core: Tokenizer) -> None:
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()


def _byte_level_with_space(core: Tokenizer) -> None:
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()


def _first_word_marked(core: Tokenizer) -> None:
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")


def _every_word_marked(core: Tokenizer) -> None:
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Fuse()


def _composed(core: Tokenizer) -> None:
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    _byte_level(core)


_KINDS = (_byte_level, _byte_level_with_space, _first_word_marked, _every_word_marked, _composed)


def _tokenizer(kind: Any, **flags: bool) -> PreTrainedTokenizerFast:
    """`flags`: of one more added token, `<n>`."""
    words = [*_ALPHABET, "\u2581", *("".join(pair) for pair in _MERGES)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES, byte_fallback=False))
    kind(core)
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in _MARKS])
    core.add_tokens([AddedToken("<n>", **flags)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


_PIECES = st.sampled_from(
    [*_MARKS, "<n>", "ab", "abc", " ab", "b ", "a", " ", "\n", "e\u0301", "\u4e2d", "<", "x" * 9]
)
_TEXTS = st.lists(_PIECES, max_size=40).map("".join)
_FLAGS = ("lstrip", "rstrip", "single_word")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("longest", [1, 8, 20])
@given(_TEXTS, st.sampled_from([*_FLAGS, "normalized", "plain"]))
@settings(max_examples=40, deadline=None)
def test_property_ids_of_segments_are_those_of_the_whole(
    kind: Any, longest: int, text: str, flag: str
) -> None:
    flags = {name: name == flag for name in (*_FLAGS, "normalized")}
    made = _tokenizer(kind, **flags)
    chat = ChatTokenizer(made)
    wanted = tuple(made.encode(text, add_special_tokens=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "_LONG_SEGMENT", longest)
        assert chat.encode(text) == wanted
        assert chat.encode(text) == wanted  # from the cache
    if flag in _FLAGS:
        assert chat._backend is None or chat._boundary is None
    elif kind in (_byte_level, _composed):
        assert chat._boundary is not None


def test_conversations_share_the_ids_of_a_long_system_prompt() -> None:
    chat = make_chat()
    read: list[int] = []
    whole = chat._encode_whole
    chat._encode_whole = lambda text: read.append(len(text)) or whole(text)  # type: ignore
    draw = random.Random(0)
    opening = "".join(draw.choices("abcdef ", k=5000))
    for number in range(5):
        messages = (("system", opening), ("user", f"question {number}"))
        ids = chat.first_ids(messages)
        assert ids == tuple(
            chat._tokenizer.encode(chat.render(messages, PLAIN), add_special_tokens=False)
        )
    assert sum(read) < 2 * len(opening)
