"""Chat messages to token ids, without ever tokenising a reply again.

A prompt that extends an earlier conversation is that conversation's ids - prompt and response as
they went through the engine - followed by the ids of what is new. Rendering and tokenising the
whole text anew would be simpler and wrong: the ids could differ from those that were sampled.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from troupe.workflow.errors import ChatTemplateError, InvalidMessagesError, shown
from troupe.workflow.toolcalls import ToolCall

Message = tuple[str, str]
"""(role, content)."""


class ToolMessage(NamedTuple):
    """A message that calls tools (role `assistant`), or answers a call (role `tool`)."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


AnyMessage = Message | ToolMessage

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

    def first_ids(self, messages: tuple[AnyMessage, ...], tools: str = "") -> tuple[int, ...]:
        """Ids of a conversation from its beginning, ready for the next reply.

        `tools`: those that are offered, as JSON. Raises `ChatTemplateError` when the tokenizer
        cannot render it.
        """

        def compute() -> tuple[int, ...]:
            rendered = self._render(messages, tools)
            if tools and rendered == self._render(messages):
                raise ChatTemplateError(
                    "the chat template does not show tools",
                    field="tokenizer.chat_template",
                    remedy="Use a template with `tools`, or describe them in the system prompt.",
                )
            return self.encode(rendered)

        return self._cached((messages, tools), compute)

    def suffix_ids(
        self, messages: tuple[AnyMessage, ...], reply: int, stop_id: int | None, tools: str = ""
    ) -> tuple[int, ...]:
        """Ids that follow the reply `messages[reply]` up to the beginning of the next one.

        `stop_id` is the token at which the reply stopped: where it is the template's own end of
        turn, that is not added again.
        """

        def compute() -> tuple[int, ...]:
            held = (*messages[:reply], ("assistant", _REPLY), *messages[reply + 1 :])
            before, found, suffix = self._render(held, tools).partition(_REPLY)
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
        key = (messages[:reply], messages[reply + 1 :], stop_id, tools)
        return self._cached(key, compute)

    @cached_property
    def ordinary_ids(self) -> tuple[int, ...]:
        """Ids of the vocabulary that are no special tokens, ascending."""
        special = set(self._tokenizer.all_special_ids)
        return tuple(sorted(set(self._tokenizer.get_vocab().values()) - special))

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

    def _render(self, messages: Sequence[AnyMessage], tools: str = "") -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template",
                field="tokenizer.chat_template",
                remedy="Save the tokenizer with one, or call `agent.generate(token_ids)`.",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [_as_template_takes(message) for message in messages],
                tools=json.loads(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # whatever a template's own `raise_exception` makes
            raise ChatTemplateError(
                f"the chat template refused the conversation: {error}",
                field="tokenizer.chat_template",
                value=[message[0] for message in messages],
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


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request: as they were given, and as one text that is equal for equal ones."""

    given: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


def parse_tools(given: Sequence[Any] | None) -> ToolSet:
    """Tools as OpenAI's requests have them, checked. Raises `InvalidMessagesError`."""
    for index, tool in enumerate(given or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise InvalidMessagesError(
                f"tool {index} needs `type: function` and a `function` with a `name`",
                field=f"tools[{index}]",
                value=tool,
                remedy='Pass {"type": "function", "function": {"name": ..., "parameters": {...}}}.',
            )
    if not given:
        return ToolSet()
    try:
        text = json.dumps(list(given), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidMessagesError(
            f"tools are not JSON: {error}", field="tools", remedy="Pass JSON values only."
        ) from error
    return ToolSet(tuple(given), text)


def parse_messages(given: str | Sequence[Any], system_prompt: str | None) -> tuple[AnyMessage, ...]:
    """What a workflow passed to `chat`, checked, with the agent's system prompt in front.

    A string is one user message; an item is a mapping with `role` and `content` as in OpenAI's
    chat (text only, `tool_calls` and `tool_call_id` included), or anything with a `.message` that
    is one (a `Reply`). Raises `InvalidMessagesError`.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[AnyMessage] = []
    for index, item in enumerate(items):
        mapping = item if isinstance(item, Mapping) else getattr(item, "message", None)
        role = mapping.get("role") if isinstance(mapping, Mapping) else None
        if not isinstance(mapping, Mapping) or not isinstance(role, str):
            raise _no_message(index, item)
        calls = _calls(mapping.get("tool_calls"), index) if role == "assistant" else ()
        content = _text(mapping.get("content"), f"messages[{index}].content")
        if content is None and calls:
            content = ""
        if content is None:
            raise _no_message(index, item)
        call_id = str(mapping.get("tool_call_id") or "") if role == "tool" else ""
        tooled = calls or call_id
        messages.append(ToolMessage(role, content, calls, call_id) if tooled else (role, content))
    if not messages:
        raise InvalidMessagesError(
            "chat() got no messages", field="messages", remedy="Pass at least one user message."
        )
    if system_prompt is not None and messages[0][0] != "system":
        messages.insert(0, ("system", system_prompt))
    return tuple(messages)


def plain(message: AnyMessage) -> Message:
    """The message for people and reward functions: calls of tools as JSON behind the text."""
    if not isinstance(message, ToolMessage):
        return message
    calls = [f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in message.calls]
    return message.role, "\n".join(filter(None, [message.content, *calls]))


def _no_message(index: int, item: Any) -> InvalidMessagesError:
    return InvalidMessagesError(
        f"message {index} needs `role` and `content`, both strings",
        field=f"messages[{index}]",
        value=item,
        remedy='Pass {"role": "user", "content": "..."}.',
    )


def _text(content: Any, field: str) -> str | None:
    """A message's text; that of its parts, one per line. None when there is no text at all."""
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else None
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidMessagesError(
                f"a part of type {shown(kind)} is no text",
                field=f"{field}[{number}]",
                value=kind,
                remedy="Send text only: agents see no images, sounds or files.",
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(given: Any, index: int) -> tuple[ToolCall, ...]:
    calls = []
    for number, item in enumerate(given or ()):
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments)
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise InvalidMessagesError(
                "a call needs a `function` with `name` and `arguments`, both strings",
                field=f"messages[{index}].tool_calls[{number}]",
                value=item,
                remedy="Send the reply's `tool_calls` back as they came.",
            )
        calls.append(ToolCall(str(item.get("id") or ""), name, arguments))
    return tuple(calls)


def _as_template_takes(message: AnyMessage) -> dict[str, Any]:
    """As Hugging Face's templates read it: arguments of a call as an object, not as text."""
    shaped: dict[str, Any] = {"role": message[0], "content": message[1]}
    if not isinstance(message, ToolMessage):
        return shaped
    if message.call_id:
        shaped["tool_call_id"] = message.call_id
    if message.calls:
        shaped["tool_calls"] = [call.message for call in message.calls]
        for call in shaped["tool_calls"]:
            with suppress(ValueError, RecursionError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return shaped
