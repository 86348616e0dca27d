"""Anthropic's Messages API: translates requests to chat completion requests, and replies to
messages and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, Field

from troupe.endpoint.errors import ApiError, FieldNames, refused
from troupe.endpoint.openai_forms import (
    FIRST_ERROR,
    ApiAnswer,
    ApiBody,
    ChatRequest,
    Neutral,
    event,
    usage,
)
from troupe.replies.reading import read_json
from troupe.rpc.ids import new_id
from troupe.workflow.backend import first_of
from troupe.workflow.messages import Reply, content_text

# Clients send thoughts back only with a signature.
_SIGNATURE: Final = "troupe"
_BLOCK_ROLES: Final = {
    "text": ("user", "assistant", "system"),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}
"""By type of a content block: the roles whose messages may have it."""


class _OutputConfig(BaseModel, extra="forbid"):
    format: dict[str, Any] | None = None
    effort: str | None = None


class _Thinking(BaseModel, extra="forbid"):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Required by the API when thinking is enabled; thoughts count only towards `max_tokens`."""
    display: str | None = None


class _ToolChoice(BaseModel):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(ApiBody):
    """`POST /v1/messages`: the fields that chat completion requests lack or define differently."""

    neutral: ClassVar[Neutral] = {
        **dict.fromkeys(("container", "mcp_servers"), not_),
        "n": lambda value: value == 1,
    }

    messages: Annotated[list[dict[str, Any]], FIRST_ERROR] = Field(min_length=1)
    system: str | Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: Annotated[list[str], FIRST_ERROR] | None = None
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None
    """An extension, as in chat completions."""
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """As `output_config.format`, in the API's beta form."""
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    tool_choice: _ToolChoice | None = None


@dataclass(frozen=True)
class AskedMessage:
    """A request of the Messages API, and its translation to the body of a chat completion
    request."""

    given: MessagesRequest
    chat: dict[str, Any]
    names: FieldNames

    @classmethod
    def of(cls, body: Mapping[str, Any], max_new_tokens: int) -> Self:
        """Return the request in `body`. The API requires `max_tokens` of every client, so it is
        capped at the agent's `max_new_tokens`. Raises `ApiError` and `InvalidMessagesError`."""
        given = MessagesRequest.validated(body)
        names = FieldNames(
            {
                "stop": "stop_sequences",
                "reasoning_effort": "output_config.effort",
                "response_format": "output_config.format",
                "response_format.json_schema": "output_config.format",
                "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            }
        )
        messages = _messages(given.messages)
        if given.system:
            system = content_text(given.system, "system")
            messages.insert(0, {"role": "system", "content": system})
        form = (given.output_config and given.output_config.format) or given.output_format
        choice = given.tool_choice
        chat = {
            "messages": messages,
            "max_tokens": min(given.max_tokens or max_new_tokens, max_new_tokens),
            "stop": given.stop if given.stop_sequences is None else given.stop_sequences,
            "reasoning_effort": given.output_config and given.output_config.effort,
            "tools": [_tool(tool, index, names) for index, tool in enumerate(given.tools or ())],
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": {"type": form.get("type"), "json_schema": form} if form else None,
        }
        if given.thinking and given.thinking.type != "adaptive":
            thinks = given.thinking.type == "enabled"
            body = {"enable_thinking": thinks, **body}
        rest = {name: value for name, value in body.items() if name not in given.neutral}
        return cls(given, given.translated(rest, chat), names)


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as chat messages, in which each tool result is a separate message."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        at = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise refused(
                f"unknown role {str(role)[:60]!r}",
                f"{at}.role",
                "Known: user, assistant, system.",
            )
        if isinstance(content, list):
            _add_blocks(messages, role, content, f"{at}.content")
        else:
            text = content_text(content, f"{at}.content")
            messages.append({"role": role, "content": text})
    if messages and messages[-1]["role"] == "assistant":
        raise refused(
            "the conversation ends with an assistant message, which cannot be continued",
            f"messages[{len(given) - 1}]",
            "End it with a user message.",
        )
    return messages


def _add_blocks(messages: list[dict[str, Any]], role: str, blocks: list[Any], field: str) -> None:
    """Append the message of `role` with these content blocks to `messages`."""
    texts: list[Any] = []
    reply: dict[str, Any] = {}
    count = len(messages)

    def end_texts() -> None:
        if texts:
            messages.append({"role": role, "content": content_text(texts, field)})
            texts.clear()

    for number, block in enumerate(blocks):
        at = f"{field}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in _BLOCK_ROLES:
            raise refused(
                f"a block of type {str(kind)[:60]!r} is not text",
                at,
                f"Known: {', '.join(_BLOCK_ROLES)}; agents cannot see images, sounds or files.",
                code="invalid_value",
            )
        if role not in _BLOCK_ROLES[kind]:
            raise refused(
                f"a message of role {role!r} has a block of type {kind!r}",
                at,
                f"Send it in a message of role {_BLOCK_ROLES[kind][0]}.",
                code="invalid_value",
            )
        if kind == "text":
            texts.append(block)
        elif kind == "tool_result":
            end_texts()
            text = content_text(block.get("content") or "", f"{at}.content")
            call = block.get("tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "thinking":
            own = content_text(block.get("thinking"), f"{at}.thinking")
            thoughts = [reply.get("reasoning_content"), own]
            reply["reasoning_content"] = "\n".join(filter(None, thoughts))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
                raise refused(
                    "a call needs a `name`, and an `input` that is an object",
                    at,
                    "Send it back as it came.",
                    code="invalid_value",
                )
            call = {"id": block.get("id"), "type": "function", "function": function}
            reply.setdefault("tool_calls", []).append(call)
    if role == "assistant":
        messages.append({"role": role, "content": content_text(texts, field), **reply})
    else:
        end_texts()
        if len(messages) == count:
            messages.append({"role": role, "content": ""})


def _tool(tool: Mapping[str, Any], index: int, names: FieldNames) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refused(
            f"a tool of type {str(tool['type'])[:60]!r} runs at Anthropic",
            f"tools[{index}].type",
            "Offer tools with an `input_schema`, and run them in the agent.",
        )
    names[f"tools[{index}].function"] = f"tools[{index}]"
    names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    known = {"name": "name", "description": "description", "input_schema": "parameters"}
    known["strict"] = "strict"
    function = {known[name]: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: _ToolChoice | None) -> Any:
    if given is None or given.type in ("auto", "none"):
        return given and given.type
    if given.type == "any":
        return "required"
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    raise refused(
        f"a tool_choice of type {given.type[:60]!r} is not supported",
        "tool_choice.type",
        "Known: auto, any, tool, none.",
    )


@dataclass(frozen=True)
class MessagesAnswer(ApiAnswer):
    """A writer of the reply to one request of the Messages API."""

    chat: ChatRequest
    id: str = field(default_factory=lambda: new_id("msg").replace("-", "_"))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a response without streaming."""
        [reply] = replies
        reason, sequence = self._end(reply)
        counts = usage(replies)
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": _blocks(reply),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "output_tokens": counts["completion_tokens"],
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }
        return self.with_own_fields(
            message, reply, token_ids=self.chat.return_token_ids, promises=self.chat.promises
        )

    def chunks(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Yield the events of a stream, including its last one."""
        message = self.whole(replies)
        end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        blocks, unmet = message["content"], message.pop("unmet", None)
        begun = {**message, "content": [], **dict.fromkeys(end)}
        begun["usage"] = {**message["usage"], "output_tokens": 0}
        yield event({"type": "message_start", "message": begun}, named=True)
        for index, block in enumerate(blocks):
            for part in _block_events(block):
                yield event({**part, "index": index}, named=True)
        last = {"type": "message_delta", "delta": end, "usage": message["usage"]}
        yield event(last if unmet is None else {**last, "unmet": unmet}, named=True)
        yield event({"type": "message_stop"}, named=True)

    def failure(self, error: ApiError) -> str:
        """Return the last event of a stream whose turn failed."""
        return event(error.anthropic_body, named=True)

    def _end(self, reply: Reply) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence`."""
        if reply.finish_reason == "length":
            return "max_tokens", None
        if reply.tool_calls:
            return "tool_use", None
        text = self.tokenizer.transcript(reply.response)
        stops = [stop for stop in self.chat.stop or () if stop in text]
        if not stops:
            return "end_turn", None
        return "stop_sequence", min(stops, key=lambda stop: first_of([stop], text) or 0)


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    """Return the content of a reply: thoughts, text, and each call."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning_content:
        thoughts = reply.reasoning_content
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": _SIGNATURE})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        made = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**made, "input": read_json(call.arguments, {})})
    return blocks


def _block_events(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one content block, which is sent whole."""
    if block["type"] == "tool_use":
        empty = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    elif block["type"] == "thinking":
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    else:
        empty = {**block, "text": ""}
        deltas = [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
    yield {"type": "content_block_start", "content_block": empty}
    for delta in deltas:
        yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}
