"""Calls of tools and thoughts inside a reply: how each family of models writes them.

What a model says is tokens; that some of them mean a call is a convention of its training. A parser
only reads: the tokens stay what they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from troupe.model_text import (
    THINK_TAGS,
    Call,
    CallSyntax,
    Parsed,
    ThinkTags,
    read_json,
    read_json_values,
    read_reply,
)

# A name longer than this is no parameter's.
_PARAMETER: Final = re.compile(r"<parameter=([^<>\s]{1,256})>\n?")
_FUNCTION: Final = re.compile(r"\s*<function=([^<>\s]{1,256})>")


class ToolCall(NamedTuple):
    """One call: `arguments` is a JSON object as text, as in OpenAI's messages."""

    id: str
    name: str
    arguments: str

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and arguments, however the JSON is written."""
        return self.name, canonical(self.arguments)

    @property
    def message(self) -> dict[str, Any]:
        """As an item of an assistant message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_ids(count: int, said: Sequence[int]) -> list[str]:
    """Ids for the calls of a response: nine letters and digits, which Mistral's templates want.

    They follow from `said`, the numbers that tell the response from others of its trajectory.
    """
    return [xxhash.xxh3_64_hexdigest(f"{said}/{number}".encode())[:9] for number in range(count)]


def canonical(arguments: str) -> str:
    """The same JSON whatever its white space and the order of its keys; other text as it is."""
    value = read_json(arguments or "{}")
    if value is None:
        return arguments.strip()
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


Offered = Sequence[Mapping[str, Any]]
"""The tools of a request."""


class ReplyParser(NamedTuple):
    """Reads the replies of one family of models."""

    syntax: Callable[[Offered], CallSyntax]
    """How the family calls these tools."""
    think_tags: ThinkTags = THINK_TAGS

    def __call__(self, text: str, tools: Offered = (), *, thinking: bool = False) -> Parsed:
        """A reply (special tokens shown, the stop token not) apart from thoughts and calls of
        `tools`. What is no well-formed call stays content: the client sees what the model said.
        `thinking`: its prompt ends inside a thought."""
        syntax = self.syntax(tools) if tools else None
        return read_reply(text, syntax, tags=self.think_tags, thinking=thinking)

    def opens_thought(self, prompt: str) -> bool:
        """Whether a reply to `prompt` begins inside a thought, as some templates have it."""
        return prompt.rstrip().endswith(tuple(opening for opening, _ in self.think_tags))


def _hermes(tools: Offered) -> CallSyntax:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    def read(body: str) -> list[Call] | None:
        call = _one(read_json(body), "arguments")
        return None if call is None else [call]

    return CallSyntax("<tool_call>", "</tool_call>", read)


def _qwen_coder(tools: Offered) -> CallSyntax:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`:
    Qwen3-Coder. Values are text unless the tool's schema says otherwise."""

    def read(body: str) -> list[Call] | None:
        function = _FUNCTION.match(body)
        inside, closed, rest = body.rpartition("</function>")
        if function is None or not closed or rest.strip() or len(inside) < function.end():
            return None
        types = _types(function[1], tools)
        arguments: dict[str, Any] = {}
        at = function.end()
        while (parameter := _PARAMETER.search(inside, at)) is not None:
            key, begin = parameter[1], parameter.end()
            end = inside.find("</parameter>", begin)
            if end < 0:
                break
            if key in arguments:
                return None  # which of the two is meant?
            value = inside[begin:end].removesuffix("\n")
            arguments[key] = (
                value if types.get(key, "string") == "string" else read_json(value, value)
            )
            at = end
        return [(function[1], json.dumps(arguments, ensure_ascii=False))]

    return CallSyntax("<tool_call>", "</tool_call>", read)


def _llama(tools: Offered) -> CallSyntax:
    """`{"name": ..., "parameters": {...}}` as the whole reply, several with `;`: Llama 3.1 on."""

    def read(text: str) -> list[Call] | None:
        calls = []
        for value in read_json_values(text.strip().removeprefix("<|python_tag|>").strip()):
            call = _one(value, "parameters") or _one(value, "arguments")
            if call is None:
                return None
            calls.append(call)
        return calls

    return CallSyntax("", "", read)


def _mistral(tools: Offered) -> CallSyntax:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` at the end: Mistral."""

    def read(text: str) -> list[Call] | None:
        given = read_json(text)
        calls = [_one(item, "arguments") for item in given] if isinstance(given, list) else []
        whole = [call for call in calls if call is not None]
        return whole if len(whole) == len(calls) else None

    return CallSyntax("[TOOL_CALLS]", "", read)


PARSERS: Final[Mapping[str, ReplyParser]] = {
    "hermes": ReplyParser(_hermes),
    "qwen_coder": ReplyParser(_qwen_coder),
    "llama": ReplyParser(_llama),
    "mistral": ReplyParser(_mistral, (*THINK_TAGS, ("[THINK]", "[/THINK]"))),
}
"""By their name in a job (`policies.X.model.tool_parser`)."""


def _one(given: Any, arguments: str) -> Call | None:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    inside = given.get(arguments, {} if len(given) == 1 else None)
    if isinstance(inside, str):  # some models write the object as text
        inside = read_json(inside)
    if not given["name"] or not isinstance(inside, dict):
        return None
    return given["name"], json.dumps(inside, ensure_ascii=False)


def _types(name: str, tools: Offered) -> dict[str, Any]:
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {k: v.get("type") for k, v in properties.items() if isinstance(v, Mapping)}
    return {}
