"""Tokenizers whose tokens are bytes: the byte-level kind, and SentencePiece with byte fallback."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.workflow.stage import CHATML, END, PAD, START
from troupe.workflow.conversation import ChatTokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_level() -> ChatTokenizer:
    """Every byte is a token, and the first two of a four-byte character together are one, too."""
    letters = bytes_to_unicode()
    half = letters[0xF0], letters[0x9F]
    words = [PAD, START, END, *letters.values(), "".join(half)]
    core = Tokenizer(models.BPE(vocab=_numbered(words), merges=[half]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _chat(core)


def byte_fallback() -> ChatTokenizer:
    """Letters, and a token for each byte of all other characters."""
    words = [PAD, START, END, "\u2581", *_LETTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(vocab=_numbered(words), merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _chat(core)


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}


def _chat(core: Tokenizer) -> ChatTokenizer:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    tokenizer.chat_template = CHATML
    return ChatTokenizer(tokenizer)
