"""Messages and tools as workflows and clients of OpenAI's API give them, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from troupe.outcomes import NotJsonError, json_text, parse_json, safe_text, utf8_text
from troupe.workflow.errors import InvalidMessagesError, shown
from troupe.workflow.toolcalls import ToolCall

Message = tuple[str, str]
"""(role, content)."""


class ToolMessage(NamedTuple):
    """A message that has more than text: calls of tools or thoughts (role `assistant`), or the id
    of the call that it answers (role `tool`)."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    thoughts: str = ""


AnyMessage = Message | ToolMessage


class Rendering(NamedTuple):
    """What a chat template is given beside the messages, as JSON: equal for equal ones."""

    tools: str = ""
    options: str = ""
    """Further arguments of the template (`chat_template_kwargs`)."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request: as they were given, and as one text that is equal for equal ones."""

    given: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


# Arguments of `apply_chat_template` that are ours.
_OURS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def parse_template_options(given: Mapping[str, Any] | None) -> str:
    """Further arguments of the chat template as JSON, checked. Raises `InvalidMessagesError`."""
    if not given:
        return ""
    field = "chat_template_kwargs"
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidMessagesError(
            f"{field} must be arguments by name, not {shown(given)}",
            field=field,
            value=given,
            remedy='Pass what the template knows, for example {"enable_thinking": False}.',
        )
    if ours := sorted(_OURS & given.keys()):
        raise InvalidMessagesError(
            f"{field} cannot set {ours[0]}",
            field=f"{field}.{ours[0]}",
            value=given[ours[0]],
            remedy="Leave it out: it is Troupe that renders the conversation.",
        )
    try:
        return json_text({name: given[name] for name in sorted(given)})
    except NotJsonError as error:
        raise InvalidMessagesError(
            f"{field} are not JSON: {error}", field=field, remedy="Pass JSON values only."
        ) from error


def parse_tools(given: Sequence[Any] | None) -> ToolSet:
    """Tools as OpenAI's requests have them, checked. Raises `InvalidMessagesError`."""
    for index, tool in enumerate(given or ()):
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            raise InvalidMessagesError(
                f"tool {index} needs `type: function` and a `function` with a `name`",
                field=f"tools[{index}]",
                value=tool,
                remedy='Pass {"type": "function", "function": {"name": ..., "parameters": {...}}}.',
            )
        schema = function.get("parameters") or {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else schema
        if not isinstance(properties or {}, Mapping):
            raise InvalidMessagesError(
                f"the parameters of '{name}' are no JSON schema of an object",
                field=f"tools[{index}].function.parameters",
                value=schema,
                remedy='Pass {"type": "object", "properties": {...}}.',
            )
    if not given:
        return ToolSet()
    try:
        text = json_text(list(given))
    except NotJsonError as error:
        raise InvalidMessagesError(
            f"tools are not JSON: {error}", field="tools", remedy="Pass JSON values only."
        ) from error
    # Templates write the texts that are in them, which tokenizers take as UTF-8.
    return ToolSet(tuple(given) if text.isascii() else tuple(json.loads(text)), text)


def parse_messages(given: str | Sequence[Any], system_prompt: str | None) -> tuple[AnyMessage, ...]:
    """What a workflow passed to `chat`, checked, with the agent's system prompt in front.

    A string is one user message; an item is a mapping with `role` and `content` as in OpenAI's
    chat (text only, `tool_calls`, `tool_call_id` and `reasoning_content` included), or anything
    with a `.message` that is one (a `Reply`). Raises `InvalidMessagesError`.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidMessagesError(
            f"chat() takes a text or a list of messages, not {shown(given)}",
            field="messages",
            value=given,
            remedy='Pass "..." or [{"role": "user", "content": "..."}].',
        )
    messages: list[AnyMessage] = []
    for index, item in enumerate(items):
        mapping = item if isinstance(item, Mapping) else getattr(item, "message", None)
        role = mapping.get("role") if isinstance(mapping, Mapping) else None
        role = utf8_text(role) if isinstance(role, str) else None
        if not isinstance(mapping, Mapping) or not isinstance(role, str):
            raise _no_message(index, item)
        calls = _calls(mapping.get("tool_calls"), index) if role == "assistant" else ()
        content = _content(mapping, role, index)
        call_id = safe_text(mapping.get("tool_call_id") or "") if role == "tool" else ""
        thoughts = _thoughts(mapping, index) if role == "assistant" else ""
        if calls or call_id or thoughts:
            messages.append(ToolMessage(role, content, calls, call_id, thoughts))
        else:
            messages.append((role, content))
    if not messages:
        raise InvalidMessagesError(
            "chat() got no messages", field="messages", remedy="Pass at least one user message."
        )
    if system_prompt is not None and messages[0][0] != "system":
        messages.insert(0, ("system", utf8_text(system_prompt)))
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


def _content(message: Mapping[str, Any], role: str, index: int) -> str:
    """A message's text. An agent may have said nothing, and a tool may have nothing to tell."""
    content = message.get("content")
    field = f"messages[{index}].content"
    if isinstance(content, str):
        return utf8_text(content)
    if isinstance(content, list | tuple):
        return _text(content, field)
    if content is None and role in ("assistant", "tool"):
        refusal = message.get("refusal")
        return utf8_text(refusal) if isinstance(refusal, str) and role == "assistant" else ""
    if "content" not in message:
        raise _no_message(index, message)
    raise InvalidMessagesError(
        f"the content of a message of role {shown(role)} must be text, not {shown(content)}",
        field=field,
        value=content,
        remedy='Send a text ("" where there is none), or a list of text parts.',
    )


def _thoughts(message: Mapping[str, Any], index: int) -> str:
    """What an earlier reply thought, where the client sends it back."""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidMessagesError(
                f"{name} must be text, not {shown(value)}",
                field=f"messages[{index}].{name}",
                value=value,
                remedy="Send it back as it came, or leave it out.",
            )
        if value:
            return utf8_text(value)
    return ""


# The text of a part by its type: those of OpenAI's two APIs.
_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def _text(content: Sequence[Any], field: str) -> str:
    """The text of parts, one per line."""
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(utf8_text(part))
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _PARTS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if isinstance(part, Mapping) and key else None
        if not isinstance(text, str):
            raise InvalidMessagesError(
                f"a part of type {shown(kind)} is no text",
                field=f"{field}[{number}]",
                value=kind,
                remedy="Send text only: agents see no images, sounds or files.",
            )
        texts.append(utf8_text(text))
    return "\n".join(texts)


def _calls(given: Any, index: int) -> tuple[ToolCall, ...]:
    if given is not None and not isinstance(given, Sequence):
        given = [given]  # which is no call
    calls = []
    for number, item in enumerate(given or ()):
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, Mapping):
            arguments = _arguments(arguments, f"messages[{index}].tool_calls[{number}]")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise InvalidMessagesError(
                "a call needs a `function` with `name` and `arguments`, both strings",
                field=f"messages[{index}].tool_calls[{number}]",
                value=item,
                remedy="Send the reply's `tool_calls` back as they came.",
            )
        call_id = safe_text(item.get("id") or "")
        calls.append(ToolCall(call_id, utf8_text(name), utf8_text(arguments)))
    return tuple(calls)


def _arguments(given: Mapping[str, Any], field: str) -> str:
    try:
        return json_text(dict(given))
    except NotJsonError as error:
        raise InvalidMessagesError(
            f"the arguments of a call are not JSON: {error}",
            field=f"{field}.function.arguments",
            value=given,
            remedy="Send the reply's `tool_calls` back as they came.",
        ) from error


def as_template_takes(message: AnyMessage) -> dict[str, Any]:
    """As Hugging Face's templates read it: arguments of a call as an object, not as text."""
    shaped: dict[str, Any] = {"role": message[0], "content": message[1]}
    if not isinstance(message, ToolMessage):
        return shaped
    if message.call_id:
        shaped["tool_call_id"] = message.call_id
    if message.thoughts:
        shaped["reasoning_content"] = message.thoughts
    if message.calls:
        shaped["tool_calls"] = [call.message for call in message.calls]
        for call in shaped["tool_calls"]:
            with suppress(NotJsonError):
                call["function"]["arguments"] = parse_json(call["function"]["arguments"] or "{}")
    return shaped
