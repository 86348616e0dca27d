"""Messages, tools and replies: checks of chat input.

`parse_messages`, `parse_tools` and `parse_template_options` check the input of workflows and of
OpenAI clients.
"""

from __future__ import annotations

import base64
import json
import re
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import xxhash

from troupe.chat_templates import RESERVED_ARGUMENTS
from troupe.contracts.payloads import Payload, PayloadKinds, mark_of
from troupe.outcomes import (
    NotFiniteError,
    NotJsonError,
    finite_number,
    json_text,
    parse_json,
    safe_text,
    utf8_text,
)
from troupe.replies.reading import ThinkTags, read_json
from troupe.workflow.columns import Columns
from troupe.workflow.errors import (
    InvalidGroupError,
    InvalidMessagesError,
    InvalidRewardError,
    shown,
)
from troupe.workflow.token_ids import TokenIds

# The store limits ids of groups, which contain the key.
_GROUP_CHARS: Final = 64


class ToolCall(NamedTuple):
    """One tool call of a model; `arguments` is the text of a JSON object, as in OpenAI's
    messages."""

    id: str
    name: str
    arguments: str

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and canonical arguments."""
        return self.name, canonical(self.arguments)

    @property
    def message(self) -> dict[str, Any]:
        """The call as an item of `tool_calls` of an assistant message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_ids(count: int, turn: Sequence[int]) -> list[str]:
    """Return ids for the calls of a response: nine letters and digits, as Mistral's templates
    require.

    They are derived from `turn`, numbers that identify the response within its trajectory.
    """
    return [xxhash.xxh3_64_hexdigest(f"{turn}/{number}".encode())[:9] for number in range(count)]


def canonical(arguments: str) -> str:
    """Return JSON with sorted keys and without white space; other text is only stripped."""
    value = read_json(arguments or "{}")
    if value is None:
        return arguments.strip()
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class Reply:
    """A reply of an agent: text, token ids, tool calls, and the reward that the workflow sets."""

    __slots__ = (
        "__weakref__",
        "_earned",
        "_group",
        "_prompt_ids",
        "_reward",
        "_siblings",
        "agent",
        "chain",
        "columns",
        "content",
        "finish_reason",
        "prompt",
        "reasoning_content",
        "response",
        "response_logprobs",
        "session",
        "text",
        "tool_calls",
        "turn",
        "unmet",
    )

    def __init__(
        self,
        agent: str,
        turn: int,
        text: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str,
        content: str | None = None,
        tool_calls: tuple[ToolCall, ...] = (),
        reasoning_content: str = "",
    ) -> None:
        self.agent = agent
        self.turn = turn
        """Number of this agent's turns that began before this one; see `TurnRecord.number`."""
        self.text = text
        """Text without the stop token and other special tokens."""
        self.prompt = TokenIds.of(prompt_ids)
        """The prompt as an array, shared by the replies of one call."""
        self._prompt_ids: tuple[int, ...] | None = None
        self.response = TokenIds.of(token_ids)
        """The response as an array, including the stop token."""
        self.response_logprobs = array("d", logprobs)
        """The log-prob of each response token."""
        self.finish_reason = finish_reason
        """`stop` or `length`."""
        self.content = text if content is None else content
        """The text apart from `tool_calls` and `reasoning_content`."""
        self.reasoning_content = reasoning_content
        """Thoughts of the model: the text between `<think>` and `</think>`."""
        self.tool_calls = tool_calls
        """Calls of offered tools."""
        self.unmet: tuple[str, ...] = ()
        """Fields of an endpoint's request that the reply violates (`response_format`, ...)."""
        self.session = ""
        """Header `X-Session-ID` of an endpoint's request, by which a client with several
        conversations names the current one."""
        self._siblings: tuple[weakref.ref[Reply], ...] = ()
        self.columns = Columns(f"{agent}[{turn}]", len(token_ids))
        """User-defined columns of this turn's sample: `reply.columns[name] = value`."""
        self.chain = ""
        """For a critic (`advantage: gae`): turns of one agent with equal `chain` form one episode.
        An agent that plays several sides of a game gives each its own name."""
        self._group = ""
        self._reward: float | None = None
        self._earned: float | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Ids of the prompt, as they went to the engine."""
        if self._prompt_ids is None:
            self._prompt_ids = tuple(self.prompt)
        return self._prompt_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the response, made at each access, since they take ten times as much memory as
        `response`."""
        return tuple(self.response)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The log-prob of each response token, made at each access."""
        return tuple(self.response_logprobs)

    @property
    def siblings(self) -> tuple[Reply, ...]:
        """All replies of the same `chat(n=...)`, including this one; empty without `n`.

        These are weak references: replies that are neither in a running trajectory nor held by the
        caller are missing.
        """
        found = (reply() for reply in self._siblings)
        return tuple(reply for reply in found if reply is not None)

    @siblings.setter
    def siblings(self, replies: Sequence[Reply]) -> None:
        # Weak: a reference cycle would keep them until the garbage collector runs.
        self._siblings = tuple(weakref.ref(reply) for reply in replies)

    @property
    def message(self) -> dict[str, Any]:
        """The reply as the message to append to its conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    @property
    def reward(self) -> float | None:
        """Reward of this turn alone; None: the turn gets its agent's reward."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._reward = None if value is None else finite(value, f"{self.agent}[{self.turn}].reward")

    @property
    def earned(self) -> float | None:
        """Reward of the turn for a critic (`advantage: gae`) if it differs from `reward`, for
        example only the part of the return before the agent's next turn."""
        return self._earned

    @earned.setter
    def earned(self, value: float | None) -> None:
        self._earned = None if value is None else finite(value, f"{self.agent}[{self.turn}].earned")

    @property
    def group(self) -> str:
        """Key of the group whose rewards this turn's is compared with, in place of
        `algorithm.group_by`: all samples of the query and policy with this key. Empty: no key."""
        return self._group

    @group.setter
    def group(self, key: str) -> None:
        if not isinstance(key, str) or len(key) > _GROUP_CHARS or not (key or "-").isprintable():
            raise InvalidGroupError(
                f"must be a text of at most {_GROUP_CHARS} printable characters",
                field=f"{self.agent}[{self.turn}].group",
                value=key,
                remedy="Give turns whose rewards may be compared an equal key, such as 'opening'.",
            )
        self._group = key

    def __repr__(self) -> str:
        return f"Reply({self.agent}[{self.turn}], {self.text!r}, {self.finish_reason})"


def finite(value: Any, field: str) -> float:
    """Return `value` as a finite float. Raises `InvalidRewardError` naming `field`."""
    try:
        return finite_number(value)
    except NotFiniteError as error:
        raise InvalidRewardError(
            f"{field} must be a finite number, not {shown(value)}",
            field=field,
            value=value,
            remedy="Return numbers; give a failed attempt a low reward instead of NaN.",
        ) from error


Message = tuple[str, str]
"""(role, content)."""


class ToolMessage(NamedTuple):
    """A message with more than text: tool calls or thoughts (role `assistant`), or the id of the
    call that it answers (role `tool`)."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    thoughts: str = ""


AnyMessage = Message | ToolMessage


class Rendering(NamedTuple):
    """Arguments of a chat template in addition to the messages, as JSON text."""

    tools: str = ""
    options: str = ""
    """Further arguments of the template (`chat_template_kwargs`)."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request, as objects and as JSON text."""

    given: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


def parse_template_options(
    given: Mapping[str, Any] | None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Check `chat_template_kwargs`; return them as JSON, with `defaults` for missing ones. Raises
    `InvalidMessagesError`."""
    if not given and not defaults:
        return ""
    given = {} if given is None else given
    field = "chat_template_kwargs"
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidMessagesError(
            f"{field} must map names to arguments, not {shown(given)}",
            field=field,
            value=given,
            remedy='Pass arguments of the template, for example {"enable_thinking": False}.',
        )
    if reserved := sorted(RESERVED_ARGUMENTS & given.keys()):
        raise InvalidMessagesError(
            f"{field} cannot set {reserved[0]}",
            field=f"{field}.{reserved[0]}",
            value=given[reserved[0]],
            remedy="Leave it out: Troupe renders the conversation.",
        )
    try:
        merged = {**defaults, **given}
        return json_text({name: merged[name] for name in sorted(merged)})
    except NotJsonError as error:
        raise InvalidMessagesError(
            f"{field} are not JSON: {error}", field=field, remedy="Pass JSON values only."
        ) from error


def parse_tools(given: Sequence[Any] | None) -> ToolSet:
    """Check tools as in OpenAI's requests. Raises `InvalidMessagesError`."""
    for index, tool in enumerate(given or ()):
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
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
                f"the parameters of '{name}' are not a JSON schema of an object",
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
    # A round trip through JSON replaces halves of surrogate pairs, which tokenizers reject.
    return ToolSet(tuple(given) if text.isascii() else tuple(json.loads(text)), text)


def parse_messages(
    given: str | Sequence[Any], system_prompt: str | None, payloads: PayloadReader | None = None
) -> tuple[AnyMessage, ...]:
    """Check the messages of a `chat` call, and put the agent's system prompt first.

    A string is one user message; an item is a mapping with `role` and `content` as in OpenAI's
    chat (including `tool_calls`, `tool_call_id` and `reasoning_content`), or an object whose
    `.message` is such a mapping (a `Reply`). Content parts are texts, and the payloads that
    `payloads` reads, which leave their marks in the text. Raises `InvalidMessagesError`.
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
        content = _content(mapping, role, index, payloads)
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
    """Return the message as (role, text) for logs and reward functions, with tool calls as JSON at
    the end of the text."""
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


def _content(
    message: Mapping[str, Any], role: str, index: int, payloads: PayloadReader | None
) -> str:
    """Return the text of a message, which may be missing for the roles `assistant` and `tool`."""
    content = message.get("content")
    field = f"messages[{index}].content"
    if isinstance(content, str | list | tuple):
        return content_text(content, field, payloads)
    if content is None and role in ("assistant", "tool"):
        refusal = message.get("refusal")
        return utf8_text(refusal) if isinstance(refusal, str) and role == "assistant" else ""
    if "content" not in message:
        raise _no_message(index, message)
    raise InvalidMessagesError(
        f"the content of a message of role {shown(role)} must be text, not {shown(content)}",
        field=field,
        value=content,
        remedy='Send a text (may be ""), or a list of text parts.',
    )


def _thoughts(message: Mapping[str, Any], index: int) -> str:
    """Return the thoughts of an earlier reply if the client sends them back, else ""."""
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


# Text field by type of content part, in OpenAI's chat and responses APIs.
_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class PayloadReader:
    """Reads the payloads among content parts, of the kinds that an agent's engines take.

    A part is a `Payload`, or an image as OpenAI's API sends one: `{"type": "image_url",
    "image_url": {"url": "data:image/png;base64,..."}}`, of the kind "image".
    """

    def __init__(self, kinds: PayloadKinds) -> None:
        self._kinds = kinds
        self.marks: dict[str, tuple[Payload, Sequence[int]]] = {}
        """Of the payloads found so far."""

    def mark(self, part: Any, field: str) -> str | None:
        """The mark of a part; None: it is no payload of a known kind. Raises
        `InvalidMessagesError`."""
        payload = part if isinstance(part, Payload) else self._image(part, field)
        if payload is None or payload.kind not in self._kinds:
            return None
        mark = mark_of(payload)
        if mark not in self.marks:
            self.marks[mark] = payload, self._kinds[payload.kind](payload)
        return mark

    def _image(self, part: Any, field: str) -> Payload | None:
        is_image = isinstance(part, Mapping) and part.get("type") == "image_url"
        if not is_image or "image" not in self._kinds:
            return None
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        found = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
        try:
            data = base64.b64decode(found[2], validate=True) if found else b""
        except ValueError:
            data = b""
        if found is None or not data:
            raise InvalidMessagesError(
                "an image is sent with its message, as base64",
                field=f"{field}.image_url.url",
                value=shown(url),
                remedy='Send "data:image/png;base64,...".',
            )
        return Payload("image", found[1], data)


# Media type and content.
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.ASCII | re.DOTALL)


def content_text(content: Any, field: str, payloads: PayloadReader | None = None) -> str:
    """Return a text, or the texts of content parts joined by newlines, with the marks of payloads.

    Raises `InvalidMessagesError`."""
    if isinstance(content, str):
        return utf8_text(content)
    if not isinstance(content, list | tuple):
        raise InvalidMessagesError(
            f"the content must be text, not {shown(content)}",
            field=field,
            value=content,
            remedy='Send a text (may be ""), or a list of text parts.',
        )
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(utf8_text(part))
            continue
        if payloads is not None:
            mark = payloads.mark(part, f"{field}[{number}]")
            if mark is not None:
                texts.append(mark)
                continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _PARTS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if isinstance(part, Mapping) and key else None
        if not isinstance(text, str):
            raise InvalidMessagesError(
                f"a part of type {shown(kind)} is not text",
                field=f"{field}[{number}]",
                value=kind,
                remedy="Send text only: agents cannot see images, sounds or files.",
            )
        texts.append(utf8_text(text))
    return "\n".join(texts)


def _calls(given: Any, index: int) -> tuple[ToolCall, ...]:
    if given is not None and not isinstance(given, Sequence):
        given = [given]  # refused below
    calls = []
    for number, item in enumerate(given or ()):
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, str | Mapping | None):
            raise InvalidMessagesError(
                "a call needs a `function` with `name` and `arguments`, both strings",
                field=f"messages[{index}].tool_calls[{number}]",
                value=item,
                remedy="Send the reply's `tool_calls` back as they came.",
            )
        field = f"messages[{index}].tool_calls[{number}].function.arguments"
        call_id = safe_text(item.get("id") or "")
        calls.append(ToolCall(call_id, utf8_text(name), _arguments(arguments, field)))
    return tuple(calls)


def _arguments(given: str | Mapping[str, Any] | None, field: str) -> str:
    """Return the arguments of a call as text. Null, which some models write when there are none,
    becomes an empty object. Text that is not JSON is kept, because models write such calls."""
    if isinstance(given, Mapping):
        try:
            return json_text(dict(given))
        except NotJsonError as error:
            raise _bad_arguments(given, f"are not JSON: {error}", field) from error
    text = given or ""
    value = {} if text.startswith("{") else read_json(text or "null", {})
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise _bad_arguments(text, f"are {shown(value)}, not a JSON object", field)
    return utf8_text(text)


def _bad_arguments(given: Any, why: str, field: str) -> InvalidMessagesError:
    return InvalidMessagesError(
        f"the arguments of a call {why}",
        field=field,
        value=given,
        remedy='Send the text of a JSON object; without arguments "{}".',
    )


def as_template_takes(message: AnyMessage, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """Return the message in the form that Hugging Face templates read: arguments of calls as
    objects, or as their JSON text."""
    shaped: dict[str, Any] = {"role": message[0], "content": message[1]}
    if not isinstance(message, ToolMessage):
        return shaped
    if message.call_id:
        shaped["tool_call_id"] = message.call_id
    if message.thoughts:
        shaped["reasoning_content"] = message.thoughts
    if message.calls:
        shaped["tool_calls"] = [call.message for call in message.calls]
        for call in () if arguments_as_text else shaped["tool_calls"]:
            with suppress(NotJsonError):
                call["function"]["arguments"] = parse_json(call["function"]["arguments"] or "{}")
    return shaped


def without_thoughts(message: AnyMessage) -> AnyMessage:
    """Return the message without its `reasoning_content`."""
    return message._replace(thoughts="") if isinstance(message, ToolMessage) else message


def with_content(message: AnyMessage, content: str) -> AnyMessage:
    """Return the message with another content."""
    if isinstance(message, ToolMessage):
        return message._replace(content=content)
    return message[0], content


def inline_thoughts(content: str, tags: ThinkTags) -> tuple[str, str] | None:
    """Split a reply into the thoughts at its beginning and the rest; None if it has none."""
    for opening, closing in tags:
        head, closed, answer = content.partition(closing)
        if closed and head.lstrip().startswith(opening):
            return head.strip().removeprefix(opening).strip(), answer.lstrip()
    return None


def thoughts_of(message: AnyMessage, opened: tuple[str, str] | None, tags: ThinkTags) -> str:
    """Return the thoughts of a reply: `reasoning_content`, or the text between tags in its
    content."""
    if isinstance(message, ToolMessage) and message.thoughts:
        return message.thoughts.strip()
    for opening, closing in tags:
        head, closed, _ = message[1].partition(closing)
        if closed and (opened or head.lstrip().startswith(opening)):
            return head.strip().removeprefix(opening).strip()
    return ""
