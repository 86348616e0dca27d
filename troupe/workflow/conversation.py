"""Chat messages to token ids, without ever tokenising a reply again.

A prompt that extends an earlier conversation is that conversation's ids - prompt and response as
they went through the engine - followed by the ids of what is new. Rendering and tokenising the
whole text anew would be simpler and wrong: the ids could differ from those that were sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from troupe.workflow.errors import ChatTemplateError, InvalidMessagesError

Message = tuple[str, str]
"""(role, content)."""

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
        self._cache: OrderedDict[object, tuple[int, ...]] = OrderedDict()
        self._cached_tokens = 0

    def first_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Ids of a conversation from its beginning, ready for the next reply.

        Raises `ChatTemplateError` when the tokenizer cannot render it.
        """
        return self._cached(messages, lambda: self.encode(self._render(messages)))

    def suffix_ids(
        self, messages: tuple[Message, ...], reply: int, stop_id: int | None
    ) -> tuple[int, ...]:
        """Ids that follow the reply `messages[reply]` up to the beginning of the next one.

        `stop_id` is the token at which the reply stopped: where it is the template's own end of
        turn, that is not added again.
        """

        def compute() -> tuple[int, ...]:
            held = (*messages[:reply], ("assistant", _REPLY), *messages[reply + 1 :])
            before, found, suffix = self._render(held).partition(_REPLY)
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
        key = (messages[:reply], messages[reply + 1 :], stop_id)
        return self._cached(key, compute)

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

    def _render(self, messages: Sequence[Message]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template",
                field="tokenizer.chat_template",
                remedy="Save the tokenizer with one, or call `agent.generate(token_ids)`.",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # whatever a template's own `raise_exception` makes
            raise ChatTemplateError(
                f"the chat template refused the conversation: {error}",
                field="tokenizer.chat_template",
                value=[role for role, _ in messages],
                remedy="Use the roles in the order that the template allows.",
            ) from error
        return rendered

    def _cached(self, key: object, compute: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        ids = self._cache.get(key)
        if ids is not None:
            self._cache.move_to_end(key)
            return ids
        ids = self._cache[key] = compute()
        self._cached_tokens += len(ids)
        while self._cached_tokens > _CACHED_TOKENS and len(self._cache) > 1:
            self._cached_tokens -= len(self._cache.popitem(last=False)[1])
        return ids


class ConversationMemory:
    """The conversations of one agent in one trajectory, by what was said."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        # Messages up to and including a reply -> turn, ids up to and including it, stop token.
        self._known: dict[tuple[Message, ...], tuple[int, tuple[int, ...], int | None]] = {}

    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Ids to generate from; those of the longest known beginning are taken as they were."""
        for end in range(len(messages), 0, -1):
            if messages[end - 1][0] != "assistant":
                continue
            known = self._known.get(_key(messages[:end]))
            if known:
                _, ids, stop_id = known
                return ids + self._tokenizer.suffix_ids(messages, end - 1, stop_id)
        return self._tokenizer.first_ids(messages)

    def remember(
        self,
        messages: tuple[Message, ...],
        reply: str,
        turn: int,
        prompt_ids: tuple[int, ...],
        response_ids: tuple[int, ...],
        *,
        stopped: bool,
    ) -> None:
        """Note a reply. Of two equal ones the earlier turn counts, whichever ended first."""
        key = _key((*messages, ("assistant", reply)))
        known = self._known.get(key)
        if response_ids and (known is None or turn < known[0]):
            stop_id = response_ids[-1] if stopped else None
            self._known[key] = (turn, prompt_ids + response_ids, stop_id)


def _key(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Replies come back from workflows with their outer white space trimmed, often enough."""
    return tuple((r, c.strip() if r == "assistant" else c) for r, c in messages)


def parse_messages(given: str | Sequence[Any], system_prompt: str | None) -> tuple[Message, ...]:
    """What a workflow passed to `chat`, checked, with the agent's system prompt in front.

    A string is one user message; an item is a mapping with `role` and `content`, or anything with
    a `.message` that is one (a `Reply`). Raises `InvalidMessagesError`.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[Message] = []
    for index, item in enumerate(items):
        mapping = item if isinstance(item, Mapping) else getattr(item, "message", None)
        role = mapping.get("role") if isinstance(mapping, Mapping) else None
        content = mapping.get("content") if isinstance(mapping, Mapping) else None
        if not (isinstance(role, str) and isinstance(content, str)):
            raise InvalidMessagesError(
                f"message {index} needs `role` and `content`, both strings",
                field=f"messages[{index}]",
                value=item,
                remedy='Pass {"role": "user", "content": "..."}.',
            )
        messages.append((role, content))
    if not messages:
        raise InvalidMessagesError(
            "chat() got no messages", field="messages", remedy="Pass at least one user message."
        )
    if system_prompt is not None and messages[0][0] != "system":
        messages.insert(0, ("system", system_prompt))
    return tuple(messages)
