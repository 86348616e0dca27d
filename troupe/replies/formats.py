"""Formats of replies by family of models: the syntax of tool calls and the tags of thoughts.

A family is a function that returns its `CallSyntax`, and a line in `PARSERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from troupe.replies.reading import (
    THINK_TAGS,
    Call,
    CallSyntax,
    Parsed,
    ThinkTags,
    read_json,
    read_json_values,
    read_reply,
)

# Names of parameters and functions have at most 256 characters.
_PARAMETER: Final = re.compile(r"<parameter=([^<>\s]{1,256})>\n?")
_FUNCTION: Final = re.compile(r"\s*<function=([^<>\s]{1,256})>")

Offered = Sequence[Mapping[str, Any]]
"""Tools of a request."""


class ReplyParser(NamedTuple):
    """The parser of the replies of one family of models."""

    syntax: Callable[[Offered], CallSyntax]
    """Call syntax of the family, given the offered tools."""
    think_tags: ThinkTags = THINK_TAGS

    def __call__(self, text: str, tools: Offered = (), *, thinking: bool = False) -> Parsed:
        """Split a reply (with special tokens, without the stop token) into content, calls of
        `tools` and thoughts. Malformed calls stay content. `thinking`: the prompt ends inside a
        thought."""
        syntax = self.syntax(tools) if tools else None
        return read_reply(text, syntax, tags=self.think_tags, thinking=thinking)

    def opens_thought(self, prompt: str) -> bool:
        """Return whether `prompt` ends with an opening think tag, which some templates write."""
        return prompt.rstrip().endswith(tuple(opening for opening, _ in self.think_tags))


def _hermes(tools: Offered) -> CallSyntax:
    """Return the syntax `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes,
    Qwen2.5, Qwen3."""

    def read(body: str) -> list[Call] | None:
        call = _one(read_json(body), "arguments")
        return None if call is None else [call]

    return CallSyntax("<tool_call>", "</tool_call>", read)


def _qwen_coder(tools: Offered) -> CallSyntax:
    """Return the syntax
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`:
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
                return None  # ambiguous
            value = inside[begin:end].removesuffix("\n")
            arguments[key] = (
                value if types.get(key, "string") == "string" else read_json(value, value)
            )
            at = end
        return [(function[1], json.dumps(arguments, ensure_ascii=False))]

    return CallSyntax("<tool_call>", "</tool_call>", read)


def _llama(tools: Offered) -> CallSyntax:
    """Return the syntax `{"name": ..., "parameters": {...}}` as the whole reply, several calls with
    `;`: Llama 3.1 and later."""

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
    """Return the syntax `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` at the end:
    Mistral."""

    def read(text: str) -> list[Call] | None:
        given = read_json(text)
        calls = [_one(item, "arguments") for item in given] if isinstance(given, list) else []
        whole = [call for call in calls if call is not None]
        return whole if len(whole) == len(calls) else None

    return CallSyntax("[TOOL_CALLS]", "", read)


def _one(given: Any, arguments: str) -> Call | None:
    """Return the call in a JSON object with `name` and the key `arguments`; None if there is
    none."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    inside = given.get(arguments, {} if len(given) == 1 else None)
    if isinstance(inside, str):  # some models write the object as text
        inside = read_json(inside)
    if not given["name"] or not isinstance(inside, dict):
        return None
    return given["name"], json.dumps(inside, ensure_ascii=False)


def _types(name: str, tools: Offered) -> dict[str, Any]:
    """Return the JSON schema types of the parameters of the tool `name`."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {k: v.get("type") for k, v in properties.items() if isinstance(v, Mapping)}
    return {}


REASONING_TAGS: Final[Mapping[str, ThinkTags]] = {
    "think": THINK_TAGS,
    "mistral": (*THINK_TAGS, ("[THINK]", "[/THINK]")),
    "none": (),
}
"""By `policies.X.model.reasoning_parser` of a job."""

PARSERS: Final[Mapping[str, ReplyParser]] = {
    "hermes": ReplyParser(_hermes),
    "qwen_coder": ReplyParser(_qwen_coder),
    "llama": ReplyParser(_llama),
    "mistral": ReplyParser(_mistral, REASONING_TAGS["mistral"]),
}
"""By `policies.X.model.tool_parser` of a job."""
if TYPE_CHECKING:
    ParserName = str
    ReasoningName = str
else:
    ParserName = Literal[tuple(PARSERS)]
    ReasoningName = Literal[tuple(REASONING_TAGS)]


@cache
def parser_of(tool_parser: str, reasoning_parser: str | None) -> ReplyParser:
    """Return the parser of a model, by the names in its section of the job."""
    parser = PARSERS[tool_parser]
    if reasoning_parser is None:
        return parser
    return parser._replace(think_tags=REASONING_TAGS[reasoning_parser])
