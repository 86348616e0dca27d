"""A tokenizer without files, for trying a workflow without a model."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from typing import Any, Final

SPECIALS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|other|>")
END_ID: Final = 0
_FIRST_BYTE: Final = len(SPECIALS)
_SPECIAL: Final = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")


class ByteTokenizer:
    """A tokenizer with one id per byte of UTF-8, a chat template, and the part of a Hugging Face
    tokenizer's interface that `ChatTokenizer` uses."""

    chat_template = "<|role|>content<|end|>..."
    all_special_ids = tuple(range(_FIRST_BYTE))
    eos_token_id = END_ID

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the special tokens and of the characters of random texts."""
        readable = string.ascii_lowercase + string.digits + " "
        return {
            **{token: i for i, token in enumerate(SPECIALS)},
            **{c: ord(c) + _FIRST_BYTE for c in readable},
        }

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; special tokens are never added."""
        ids: list[int] = []
        for part in _SPECIAL.split(text):
            if part in SPECIALS:
                ids.append(SPECIALS.index(part))
            else:
                ids += [byte + _FIRST_BYTE for byte in part.encode("utf-8", "surrogatepass")]
        return ids

    def __call__(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> dict[str, list[list[int]]]:
        """Return the ids of several texts."""
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        parts: list[str] = []
        run = bytearray()
        for i in [*ids, None]:
            if i is not None and i >= _FIRST_BYTE:
                run.append((i - _FIRST_BYTE) % 256)
                continue
            parts.append(run.decode("utf-8", "replace"))
            run.clear()
            if i is not None and not skip_special_tokens:
                parts.append(SPECIALS[i])
        return "".join(parts)

    def convert_ids_to_tokens(self, token: int) -> bytes:
        """Return a token as it is in the vocabulary."""
        if token < _FIRST_BYTE:
            return SPECIALS[token].encode()
        return bytes([(token - _FIRST_BYTE) % 256])

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> str:
        """Return the conversation as text, ready for the next reply; tools and their calls are
        JSON."""
        offered = "".join(f"{json.dumps(tool)}\n" for tool in tools or ())
        text = f"{_marker('system')}{offered}{SPECIALS[END_ID]}" if offered else ""
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            made = "".join(f"\n<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            text += f"{_marker(message['role'])}{message['content']}{made}{SPECIALS[END_ID]}"
        return text + _marker("assistant") if add_generation_prompt else text


def _marker(role: str) -> str:
    return f"<|{role}|>" if f"<|{role}|>" in SPECIALS[1:] else f"<|other|>{role}: "
