"""Calls of tools inside a reply: how each family of models writes them, and reading them back.

What a model says is tokens; that some of them mean a call is a convention of its training. A parser
only reads: the tokens stay what they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash


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


class Parsed(NamedTuple):
    """A reply's text apart from its calls, and (name, arguments as JSON text) of those."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()


ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]
"""Reads a reply's text (special tokens shown, the stop token not) given the tools of the request.
What is no well-formed call stays content: the client sees what the model said."""


def call_ids(count: int, said: Sequence[int]) -> list[str]:
    """Ids for the calls of a response: nine letters and digits, which Mistral's templates want.

    They follow from `said`, the numbers that tell the response from others of its trajectory.
    """
    return [xxhash.xxh3_64_hexdigest(f"{said}/{number}".encode())[:9] for number in range(count)]


def canonical(arguments: str) -> str:
    """The same JSON whatever its white space and the order of its keys; other text as it is."""
    value = _json(arguments or "{}")
    if value is None:
        return arguments.strip()
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    return _blocks(text, lambda body: _one(_json(body), "arguments"))


def qwen_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`:
    Qwen3-Coder. Values are text unless the tool's schema says otherwise."""

    def read(body: str) -> tuple[str, str] | None:
        function = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
        if function is None:
            return None
        name, inside = function.groups()
        types = _types(name, tools)
        arguments = {
            key: value if types.get(key, "string") == "string" else _json(value, value)
            for key, value in re.findall(
                r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", inside, re.DOTALL
            )
        }
        return name, json.dumps(arguments, ensure_ascii=False)

    return _blocks(text, read)


def llama(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """`{"name": ..., "parameters": {...}}` as the whole reply, several with `;`: Llama 3.1 on."""
    said = text.strip().removeprefix("<|python_tag|>").strip()
    calls = []
    for part in _objects(said):
        call = _one(part, "parameters") or _one(part, "arguments")
        if call is None:
            return Parsed(text)
        calls.append(call)
    return Parsed("", tuple(calls)) if calls else Parsed(text)


def mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` at the end: Mistral."""
    content, found, tail = text.partition("[TOOL_CALLS]")
    given = _json(tail) if found else None
    calls = [_one(item, "arguments") for item in given] if isinstance(given, list) else []
    whole = [call for call in calls if call is not None]
    if not whole or len(whole) < len(calls):
        return Parsed(text)
    return Parsed(content.strip(), tuple(whole))


PARSERS: Final[Mapping[str, ToolParser]] = {
    "hermes": hermes,
    "qwen_coder": qwen_coder,
    "llama": llama,
    "mistral": mistral,
}
"""By their name in a job (`policies.X.model.tool_parser`)."""


def _blocks(text: str, read: Callable[[str], tuple[str, str] | None]) -> Parsed:
    """Content without the `<tool_call>` blocks that `read` understands, and what it read."""
    calls: list[tuple[str, str]] = []

    def take(block: re.Match[str]) -> str:
        call = read(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    content = re.sub(r"<tool_call>(.*?)</tool_call>", take, text, flags=re.DOTALL)
    return Parsed(content.strip(), tuple(calls)) if calls else Parsed(text)


def _one(given: Any, arguments: str) -> tuple[str, str] | None:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    inside = given.get(arguments, {} if len(given) == 1 else None)
    if isinstance(inside, str):  # some models write the object as text
        inside = _json(inside)
    if not given["name"] or not isinstance(inside, dict):
        return None
    return given["name"], json.dumps(inside, ensure_ascii=False)


def _objects(text: str) -> Iterator[Any]:
    """JSON values one after another; a last None where the text is no JSON."""
    decoder, at = json.JSONDecoder(parse_constant=_refuse), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        at = len(text) - len(text[at:].lstrip("; \n\t"))


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {k: v.get("type") for k, v in properties.items() if isinstance(v, Mapping)}
    return {}


def _json(text: str, otherwise: Any = None) -> Any:
    """The value, or `otherwise`: a model may write anything, NaN and a thousand brackets too."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return otherwise


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
