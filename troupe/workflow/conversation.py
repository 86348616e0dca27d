"""Chat messages to token ids, without ever tokenising a reply again.

A prompt that extends an earlier conversation is that conversation's ids - prompt and response as
they went through the engine - followed by the ids of what is new. Rendering and tokenising the
whole text anew would be simpler and wrong: the ids could differ from those that were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

from troupe.workflow.errors import ChatTemplateError
from troupe.workflow.messages import AnyMessage, Rendering, as_template_takes

PLAIN: Final = Rendering()
"""Messages alone."""

# Stands for the last reply while a template is rendered: what comes after it is the new text.
_REPLY = "\x02troupe-reply\x03"

# Token ids kept per policy; a long-lived process must not grow with the number of queries.
_CACHED_TOKENS = 500_000


class ChatTokenizer:
    """A Hugging Face tokenizer seen as messages <-> ids; shared by all trajectories of a policy.

    Not thread-safe.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._cached_tokens = 0

    def first_ids(
        self, messages: tuple[AnyMessage, ...], rendering: Rendering = PLAIN
    ) -> tuple[int, ...]:
        """Ids of a conversation from its beginning, ready for the next reply.

        `rendering`: tools that are offered, and options. Raises `ChatTemplateError` when the
        tokenizer cannot render it.
        """

        def compute() -> tuple[int, ...]:
            rendered = self._render(messages, rendering)
            if rendering.tools and rendered == self._render(messages, rendering._replace(tools="")):
                raise ChatTemplateError(
                    "the chat template does not show tools",
                    field="tokenizer.chat_template",
                    remedy="Use a template with `tools`, or describe them in the system prompt.",
                )
            return self.encode(rendered)

        return self._cached((messages, rendering), compute)

    def suffix_ids(
        self,
        messages: tuple[AnyMessage, ...],
        reply: int,
        stop_id: int | None,
        rendering: Rendering = PLAIN,
    ) -> tuple[int, ...]:
        """Ids that follow the reply `messages[reply]` up to the beginning of the next one.

        `stop_id` is the token at which the reply stopped: where it is the template's own end of
        turn, that is not added again.
        """

        def compute() -> tuple[int, ...]:
            held = (*messages[:reply], ("assistant", _REPLY), *messages[reply + 1 :])
            before, found, suffix = self._render(held, rendering).partition(_REPLY)
            if not found or _REPLY in before + suffix:
                raise ChatTemplateError(
                    "the chat template does not show an earlier reply as it was",
                    field="tokenizer.chat_template",
                    remedy="Use a template that renders the content of assistant messages.",
                )
            if stop_id is not None:
                suffix = suffix.removeprefix(self._decode([stop_id]))
            return self.encode(suffix)

        # The reply's own text is not part of the key: the sentinel stands for it.
        key = (messages[:reply], messages[reply + 1 :], stop_id, rendering)
        return self._cached(key, compute)

    @cached_property
    def ordinary_ids(self) -> tuple[int, ...]:
        """Ids of the vocabulary that are no special tokens, ascending."""
        special = set(self._tokenizer.all_special_ids)
        return tuple(sorted(set(self._tokenizer.get_vocab().values()) - special))

    @property
    def end_id(self) -> int | None:
        """The token that ends a turn, if the tokenizer says one."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` with nothing added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int], *, stopped: bool = False) -> str:
        """A response for people: without special tokens and, if it `stopped`, its last one."""
        if stopped:
            ids = ids[:-1]
        return self._decode(ids, skip_special_tokens=True)

    def transcript(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens shown."""
        return self._decode(ids)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        decoded: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return decoded

    def _render(self, messages: Sequence[AnyMessage], rendering: Rendering) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template",
                field="tokenizer.chat_template",
                remedy="Save the tokenizer with one, or call `agent.generate(token_ids)`.",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [as_template_takes(message) for message in messages],
                tools=json.loads(rendering.tools) if rendering.tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **(json.loads(rendering.options) if rendering.options else {}),
            )
        except Exception as error:  # whatever a template's own `raise_exception` makes
            raise ChatTemplateError(
                f"the chat template refused the conversation: {error}",
                field="tokenizer.chat_template",
                value=[message[0] for message in messages],
                remedy="Use the roles in the order that the template allows.",
            ) from error
        return rendered

    def _cached(self, of: object, compute: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        # A digest: the conversations themselves would take more than the ids that are counted.
        key = hashlib.blake2b(repr(of).encode(), digest_size=16).digest()
        ids = self._cache.get(key)
        if ids is not None:
            self._cache.move_to_end(key)
            return ids
        ids = self._cache[key] = compute()
        self._cached_tokens += len(ids)
        while self._cached_tokens > _CACHED_TOKENS and len(self._cache) > 1:
            self._cached_tokens -= len(self._cache.popitem(last=False)[1])
        return ids
