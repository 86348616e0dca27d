"""Promises: requirements of a request that only constrained decoding could enforce.

Examples are `tool_choice: required`, `parallel_tool_calls: false` and a JSON schema. Constrained
decoding would train the policy on tokens that it did not choose. Instead, the model gets the
promises as an instruction in its system prompt, and replies that break them are reported (`unmet`).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from troupe.endpoint.errors import ApiError, refused
from troupe.replies.reading import read_json
from troupe.workflow.messages import Reply

# Upper bound of comparisons between a part of a value and a part of a schema.
_MAX_STEPS: Final = 200_000
_SHOWN: Final = 80
_NOT_JSON: Final = object()


@dataclass(frozen=True)
class Promises:
    """Requirements of the replies to one request; empty if it has none."""

    tool_choice: str = ""
    """`required`, or the name of the function that must be called."""
    named: bool = False
    """Whether `tool_choice` is a name."""
    one_call: bool = False
    """At most one call may be made."""
    object_only: bool = False
    """The content must be a JSON object."""
    schema: Any = None
    """JSON schema that the content must match."""
    has_schema: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON schemas of the arguments of `strict` tools, by name."""

    def __bool__(self) -> bool:
        return bool(self.needs_lenient or self.arguments)

    @property
    def needs_lenient(self) -> str:
        """The first field that needs a lenient endpoint; empty: none."""
        if self.tool_choice:
            return "tool_choice"
        if self.one_call:
            return "parallel_tool_calls"
        return "response_format" if self.object_only or self.has_schema else ""

    @property
    def instruction(self) -> str:
        """The promises as an instruction to the model; empty if the chat template states them
        all."""
        lines = []
        if self.named:
            lines.append(f"Reply by calling the tool `{self.tool_choice}`.")
        elif self.tool_choice:
            lines.append("Reply by calling at least one of the tools.")
        if self.one_call:
            lines.append("Call at most one tool in a reply.")
        # Models are trained on these texts: changed words are another prompt.
        if self.has_schema:
            lines.append(
                "What you answer must be one JSON value that matches this JSON schema, and nothing "
                f"else:\n{json.dumps(self.schema)}"
            )
        elif self.object_only:
            lines.append("What you answer must be one JSON object, and nothing else.")
        return "\n".join(lines)

    def unmet(self, reply: Reply) -> list[dict[str, str]]:
        """Return the promises that the reply breaks, as {param, message}."""
        return [{"param": param, "message": message} for param, message in self._unmet(reply)]

    def _unmet(self, reply: Reply) -> Iterator[tuple[str, str]]:
        names = [call.name for call in reply.tool_calls]
        if self.named and set(names) != {self.tool_choice}:
            yield "tool_choice", f"it calls {', '.join(names) or 'nothing'}"
        elif self.tool_choice and not names:
            yield "tool_choice", "it calls nothing"
        if self.one_call and len(names) > 1:
            yield "parallel_tool_calls", f"it makes {len(names)} calls"
        for number, call in enumerate(reply.tool_calls):
            if call.name in self.arguments:
                wrong = mismatch(read_json(call.arguments), self.arguments[call.name])
                if wrong:
                    yield "tools", f"call {number} of {call.name}: its arguments{wrong}"
        if (self.object_only or self.has_schema) and not names:
            value = read_json(reply.content, _NOT_JSON)
            if value is _NOT_JSON:
                yield "response_format", "the content is not one JSON value"
            elif self.object_only and not isinstance(value, dict):
                yield "response_format", "the content is not a JSON object"
            elif self.has_schema and (wrong := mismatch(value, self.schema)):
                yield "response_format", f"the content{wrong}"


def promises_of(
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
    response_format: Mapping[str, Any] | None,
) -> Promises:
    """Return the promises of a request. Raises `ApiError` for invalid ones."""
    functions = [f for f in (tool.get("function") for tool in tools or ()) if isinstance(f, dict)]
    choice, named = _choice(tool_choice, [str(function.get("name")) for function in functions])
    schema, has_schema, object_only = _format(response_format)
    return Promises(
        tool_choice=choice,
        named=named,
        # Nothing can be called without tools.
        one_call=parallel_tool_calls is False and bool(tools) and tool_choice != "none",
        object_only=object_only,
        schema=schema,
        has_schema=has_schema,
        arguments={
            str(function.get("name")): function.get("parameters") or {}
            for function in functions
            if function.get("strict")
        },
    )


def _choice(given: str | Mapping[str, Any] | None, names: Sequence[str]) -> tuple[str, bool]:
    if given in (None, "auto", "none"):
        return "", False
    if given == "required":
        if not names:
            raise _invalid("tool_choice", "it requires a call, but there are no tools")
        return "required", False
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise refused(
            "unknown kind of `tool_choice`",
            "tool_choice",
            'Known: "auto", "none", "required" and {"type": "function", "function": {"name": ...}}.'
            " Instead of `allowed_tools` send only those tools.",
        )
    if not isinstance(name, str) or name not in names:
        known = ", ".join(names[:20]) or "none"
        raise _invalid("tool_choice", f"it names an unknown tool; known: {known}")
    return name, True


def _format(given: Mapping[str, Any] | None) -> tuple[Any, bool, bool]:
    kind = (given or {}).get("type", "text")
    inside = given.get("json_schema") if given else None
    if given and kind in ("text", "json_object"):
        # Other servers take a schema here; the reply would not be held to it.
        for part in (given, inside):
            if isinstance(part, Mapping) and part.get("schema") is not None:
                raise refused(
                    f"`response_format` of type {kind} has a `schema`",
                    "response_format",
                    'Send it as {"type": "json_schema", "json_schema": {"schema": ...}}.',
                )
    if not given or kind == "text":
        return None, False, False
    if kind == "json_object":
        return None, False, True
    if kind != "json_schema":
        raise refused(
            "unknown type of `response_format`",
            "response_format",
            "Known: text, json_object, json_schema.",
        )
    schema = inside.get("schema") if isinstance(inside, Mapping) else None
    if not isinstance(schema, dict | bool):
        raise _invalid("response_format", "it has no schema", ".json_schema.schema")
    return schema, True, False


def _invalid(param: str, message: str, inside: str = "") -> ApiError:
    return ApiError(400, f"`{param}`: {message}.", code="invalid_value", param=param + inside)


def mismatch(value: Any, schema: Any) -> str:
    """Describe how `value` fails to match a JSON schema, as the end of a sentence; empty if it
    matches.

    Supports types, `enum`, `const`, objects, arrays, bounds, `anyOf`, `oneOf` (as anyOf), `allOf`,
    `not` and references inside the schema. Patterns and formats are ignored: a client's pattern may
    take unbounded time on a model's text.
    """
    try:
        return _Check(schema).of(value, schema, "")
    except (_TooLarge, RecursionError):
        return " cannot be checked: value and schema are too large"


class _TooLarge(Exception):
    """The check exceeds `_MAX_STEPS`."""


_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": (int, float),
    "boolean": bool,
    "null": type(None),
}
_Holds = Callable[[Any, Any], bool]
_BOUNDS: Final[Mapping[str, _Holds]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZES: Final[Mapping[str, tuple[type[str | list[Any] | dict[str, Any]], _Holds]]] = {
    "minLength": (str, operator.ge),
    "maxLength": (str, operator.le),
    "minItems": (list, operator.ge),
    "maxItems": (list, operator.le),
    "minProperties": (dict, operator.ge),
    "maxProperties": (dict, operator.le),
}


class _Check:
    """A check of one value against one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        # By schema and value, so that a reference back to itself at the same value ends.
        self._done: dict[tuple[int, int], str] = {}

    def of(self, value: Any, schema: Any, at: str) -> str:
        """Describe how `value`, found at path `at`, fails to match."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise _TooLarge
        if schema is False:
            return f"{at} should not be there"
        if not isinstance(schema, dict):
            return ""
        key = id(schema), id(value)
        if key not in self._done:
            self._done[key] = ""
            self._done[key] = next(self._wrong(value, schema, at), "")
        return self._done[key]

    def _wrong(self, value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
        if (reference := schema.get("$ref")) is not None and (
            wrong := self.of(value, self._resolve(reference), at)
        ):
            yield wrong
        wanted = schema.get("type")
        if wanted is not None and not any(
            _is(value, kind) for kind in (wanted if isinstance(wanted, list) else [wanted])
        ):
            yield f"{at} is not of type {_shown(wanted)}: {_shown(value)}"
        options = schema.get("enum")
        if isinstance(options, list) and not any(_same(value, one) for one in options):
            yield f"{at} is not one of {_shown(options)}: {_shown(value)}"
        if "const" in schema and not _same(value, schema["const"]):
            yield f"{at} is not {_shown(schema['const'])}: {_shown(value)}"
        for name, holds in _BOUNDS.items():
            bound = schema.get(name)
            if _is(value, "number") and _is(bound, "number") and not holds(value, bound):
                yield f"{at} is against `{name}: {_shown(bound)}`: {_shown(value)}"
        for name, (kind, fits) in _SIZES.items():
            bound = schema.get(name)
            if isinstance(value, kind) and _is(bound, "number") and not fits(len(value), bound):
                yield f"{at} is against `{name}: {_shown(bound)}`"
        if isinstance(value, dict):
            yield from self._wrong_object(value, schema, at)
        elif isinstance(value, list):
            yield from self._wrong_array(value, schema, at)
        for part in _list(schema.get("allOf")):
            if wrong := self.of(value, part, at):
                yield wrong
        for name in ("anyOf", "oneOf"):
            choices = _list(schema.get(name))
            reasons = [self.of(value, choice, at) for choice in choices]
            if choices and all(reasons):
                yield reasons[0] if len(reasons) == 1 else f"{at} matches none of its `{name}`"
        if "not" in schema and not self.of(value, schema["not"], at):
            yield f"{at} matches what it should not"

    def _wrong_object(
        self, value: dict[str, Any], schema: Mapping[str, Any], at: str
    ) -> Iterator[str]:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                yield f"{at} lacks {_shown(name)}"
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, inner in value.items():
            if wrong := self.of(inner, known.get(name, others), f"{at}.{name[:_SHOWN]}"):
                yield wrong

    def _wrong_array(self, value: list[Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
        first = _list(schema.get("prefixItems"))
        rest = schema.get("items", True)
        for number, inner in enumerate(value):
            part = first[number] if number < len(first) else rest
            if wrong := self.of(inner, part, f"{at}[{number}]"):
                yield wrong

    def _resolve(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True  # outside the schema: not fetched
        found = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return True
            found = found[name]
        return found


def _is(value: Any, kind: Any) -> bool:
    known = _TYPES.get(kind) if isinstance(kind, str) else None
    if known is None:
        return True
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if kind == "integer" and isinstance(value, float):
        return bool(value.is_integer())
    return isinstance(value, known)


def _same(one: Any, other: Any) -> bool:
    # In Python, True equals 1.
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
