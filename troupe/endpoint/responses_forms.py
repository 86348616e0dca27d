"""OpenAI's Responses API: translates requests to chat completion requests, and replies to responses
and events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import not_
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, Field

from troupe.endpoint.errors import ApiError, FieldNames, refused
from troupe.endpoint.openai_forms import (
    FIRST_ERROR,
    ROLES,
    ApiAnswer,
    ApiBody,
    ChatRequest,
    Neutral,
    event,
    usage,
)
from troupe.rpc.ids import new_id
from troupe.workflow.messages import Reply, content_text

# Fields of a response that repeat the request, with defaults for those that it lacks.
_REPEATED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = frozenset(
    {
        _LOGPROBS,
        # Parts that no response here has.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class ResponseHistory:
    """The stored responses of one agent, for `previous_response_id` and references to items."""

    def __init__(self) -> None:
        self._items: dict[str, dict[str, Any]] = {}
        # By response: the previous response, the input after it, and the output.
        self._stored: dict[str, tuple[str | None, list[dict[str, Any]]]] = {}

    def add(
        self,
        response: str,
        previous: str | None,
        given: Sequence[dict[str, Any]],
        output: Sequence[dict[str, Any]],
    ) -> None:
        """Store a response with the input that was `given` after the `previous` one."""
        self._stored[response] = previous, [*given, *output]
        self._items |= {item["id"]: item for item in output}

    def before(self, previous: str | None) -> list[dict[str, Any]]:
        """Return all items up to the end of a response. Raises `ApiError` if it is not stored."""
        parts: list[list[dict[str, Any]]] = []
        while previous is not None:
            if previous not in self._stored:
                raise refused(
                    f"unknown response {previous[:80]!r}",
                    "previous_response_id",
                    "Name a response of this agent in this trajectory that was not made with "
                    "`store: false`, or send the whole input.",
                    code="previous_response_not_found",
                )
            previous, items = self._stored[previous]
            parts.append(items)
        return [item for part in reversed(parts) for item in part]

    def item(self, item_id: Any, at: str) -> dict[str, Any]:
        """Return the output item with this id. Raises `ApiError`."""
        found = self._items.get(item_id) if isinstance(item_id, str) else None
        if found is None:
            raise refused("unknown item", at, "Send the item itself.", code="invalid_value")
        return found


class _TextOptions(BaseModel, extra="forbid"):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _ReasoningOptions(BaseModel, extra="forbid"):
    effort: str | None = None
    # The reply contains the thoughts themselves: there is no summary.
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ApiBody):
    """`POST /v1/responses`: the fields that chat completion requests do not have."""

    neutral: ClassVar[Neutral] = {
        **dict.fromkeys(("background", "conversation", "prompt"), not_),
        "n": lambda value: value == 1,
    }

    input: str | Annotated[list[dict[str, Any]], FIRST_ERROR] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    include: Annotated[list[str], FIRST_ERROR] | None = None
    text: _TextOptions | None = None
    reasoning: _ReasoningOptions | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}] if self.input else []
        return self.input


@dataclass(frozen=True)
class AskedResponse:
    """A request of the Responses API, and its translation to the body of a chat completion
    request."""

    body: Mapping[str, Any]
    given: ResponsesRequest
    chat: dict[str, Any]
    names: FieldNames

    @classmethod
    def of(cls, body: Mapping[str, Any], history: ResponseHistory) -> Self:
        """Return the request in `body`. Raises `ApiError` and `InvalidMessagesError`."""
        given = ResponsesRequest.validated(body)
        names = FieldNames(
            {
                "messages": "input",
                "max_completion_tokens": "max_output_tokens",
                "response_format": "text.format",
                "response_format.json_schema": "text.format",
                "verbosity": "text.verbosity",
                "reasoning_effort": "reasoning.effort",
            }
        )
        if unknown := [name for name in given.include or () if name not in _INCLUDES]:
            raise refused(f"`include` has {unknown[0][:60]!r}", "include", f"Known: {_LOGPROBS}.")
        earlier = history.before(given.previous_response_id)
        messages = _messages(earlier, history) + _messages(given.items, history)
        if given.instructions:
            first = messages[0] if messages else {}
            if ROLES.get(first.get("role", "")) == "system":
                messages[0] = {**first, "content": f"{given.instructions}\n\n{first['content']}"}
            else:
                messages.insert(0, {"role": "system", "content": given.instructions})
        form = (given.text.format if given.text else None) or {}
        chat = {
            "messages": messages,
            "max_completion_tokens": given.max_output_tokens,
            "verbosity": given.text and given.text.verbosity,
            "reasoning_effort": given.reasoning and given.reasoning.effort,
            "tools": [_tool(tool, index, names) for index, tool in enumerate(given.tools or ())],
            "tool_choice": _tool_choice(given.tool_choice),
            "logprobs": _LOGPROBS in (given.include or ()),
            "response_format": {"type": form.get("type"), "json_schema": form} if form else None,
        }
        # `background` and similar fields have no effect, and chat completions lack them.
        rest = {name: value for name, value in body.items() if name not in given.neutral}
        return cls(body, given, given.translated(rest, chat), names)


def _messages(items: Sequence[dict[str, Any]], history: ResponseHistory) -> list[dict[str, Any]]:
    """Return the items as chat messages; all items of one reply become one message."""
    messages: list[dict[str, Any]] = []

    def reply(*begun_by: str) -> dict[str, Any]:
        """Return the last message if it is the assistant's and has none of these fields, else a new
        one."""
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and not any(name in last for name in begun_by):
            return last
        messages.append({"role": "assistant"})
        return messages[-1]

    for index, given in enumerate(items):
        at = f"input[{index}]"
        kind = given.get("type") or ("message" if "role" in given else "item_reference")
        item = history.item(given.get("id"), f"{at}.id") if kind == "item_reference" else given
        kind = item["type"] if kind == "item_reference" else kind
        if kind == "message":
            role, text = item.get("role"), content_text(item.get("content"), f"{at}.content")
            if not isinstance(role, str) or role not in ROLES:
                raise refused("unknown role", f"{at}.role", f"Known: {list(ROLES)}.")
            if role == "assistant":
                reply("content", "tool_calls")["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            texts = content_text(_thoughts(item), f"{at}.content")
            reply("content", "tool_calls", "reasoning_content")["reasoning_content"] = texts
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(value, str) for value in function.values()):
                raise refused(
                    "a call needs `name` and `arguments`, both strings",
                    at,
                    "Send it back as it came.",
                    code="invalid_value",
                )
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            reply().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = content_text(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise refused(
                f"unknown item type {str(kind)[:60]!r}",
                f"{at}.type",
                "Known: message, reasoning, function_call, function_call_output, item_reference.",
            )
    return messages


def _thoughts(item: Mapping[str, Any]) -> Any:
    """Return the content of a reasoning item, or its summary if it has nothing else, with texts in
    the place of parts that have one."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        return parts
    return [part.get("text", "") if isinstance(part, Mapping) else part for part in parts]


def _tool(tool: Mapping[str, Any], index: int, names: FieldNames) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refused(
            f"a tool of type {str(tool.get('type'))[:60]!r} runs at OpenAI",
            f"tools[{index}].type",
            "Offer functions, and run them in the agent.",
        )
    names[f"tools[{index}].function"] = f"tools[{index}]"
    known = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(given, Mapping):
        return given
    if given.get("type") != "function":
        raise refused(
            f"a tool_choice of type {str(given.get('type'))[:60]!r} is not supported",
            "tool_choice",
            "Known: auto, none, required, and a function.",
        )
    return {"type": "function", "function": {"name": given.get("name")}}


@dataclass(frozen=True)
class ResponsesAnswer(ApiAnswer):
    """A writer of the reply to one request of the Responses API, which also stores it."""

    asked: AskedResponse
    chat: ChatRequest
    history: ResponseHistory
    drawing: Mapping[str, Any]
    """The `temperature` and `top_p` of the turn."""
    id: str = field(default_factory=lambda: new_id("resp").replace("-", "_"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a response without streaming."""
        [reply] = replies
        output = self._output(reply)
        given = self.asked.given
        if given.store is not False:
            self.history.add(self.id, given.previous_response_id, given.items, output)
        cut = reply.finish_reason == "length"
        counts = usage(replies)
        response = {
            **self._frame("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }
        if not cut:
            response["completed_at"] = int(time.time())
        return self.with_own_fields(
            response, reply, token_ids=self.chat.return_token_ids, promises=self.chat.promises
        )

    def chunks(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Yield the events of a stream, including its last one."""
        numbers = count()
        response = self.whole(replies)
        begun = self._frame("in_progress")
        for kind in ("response.created", "response.in_progress"):
            yield _event(kind, numbers, response=begun)
        for index, item in enumerate(response["output"]):
            for kind, inside in _item_events(item):
                yield _event(kind, numbers, output_index=index, **inside)
        yield _event(f"response.{response['status']}", numbers, response=response)

    def failure(self, error: ApiError) -> str:
        """Return the last event of a stream whose turn failed."""
        # The API has the fields in the event itself; OpenAI's client raises the contents of
        # `error`.
        inside = error.body["error"]
        return event({**inside, "type": "error", "sequence_number": 0, **error.body}, named=True)

    def _frame(self, status: str) -> dict[str, Any]:
        asked = self.asked.body
        repeated = {
            name: value if asked.get(name) is None else asked[name]
            for name, value in _REPEATED.items()
        }
        return {
            **repeated,
            **self.drawing,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        """Return the output items: thoughts, text, and each call."""
        name = self.id.partition("_")[2]
        items: list[dict[str, Any]] = []
        if reply.reasoning_content:
            part = {"type": "reasoning_text", "text": reply.reasoning_content}
            items.append(
                {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [part]}
            )
        if reply.content or not reply.tool_calls:
            logprobs = self.token_logprobs(reply) if self.chat.logprobs else []
            text = {"type": "output_text", "text": reply.content, "annotations": []}
            content = [{**text, "logprobs": logprobs}]
            items.append(
                {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content}
            )
        for number, call in enumerate(reply.tool_calls):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{name}_{number}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
        for item in items:
            item["status"] = "completed"
        if reply.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        return items


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Type and fields of the events of one output item, which is sent whole."""
    name = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
        yield "function_call_arguments.delta", {**name, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "function_call_arguments.done", {**name, **done}
    else:
        yield "output_item.added", {"item": {**item, "content": [], "status": "in_progress"}}
        [part] = item["content"]
        kind, text = part["type"], part["text"]
        at = {**name, "content_index": 0}
        more = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        empty = {**part, "text": "", **({"logprobs": []} if more else {})}
        yield "content_part.added", {**at, "part": empty}
        if text:
            yield f"{kind}.delta", {**at, "delta": text, **more}
        yield f"{kind}.done", {**at, "text": text, **more}
        yield "content_part.done", {**at, "part": part}
    yield "output_item.done", {"item": item}


def _event(kind: str, numbers: Iterator[int], **fields: Any) -> str:
    name = kind if kind.startswith("response.") else f"response.{kind}"
    return event({"type": name, "sequence_number": next(numbers), **fields}, named=True)
