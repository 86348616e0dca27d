"""Calling the job's tools from a workflow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from troupe.contracts import kinds
from troupe.outcomes import NotJsonError, json_text, parse_json, safe_text
from troupe.workflow import numbering
from troupe.workflow.backend import ToolBackend
from troupe.workflow.errors import ToolError
from troupe.workflow.messages import ToolCall

# Kinds of failures of the call itself (not of the service), which `run` returns to the model.
_MODEL_ERRORS: Final = frozenset(
    {
        kinds.UNKNOWN_TOOL,
        kinds.BAD_ARGUMENTS,
        kinds.RAISED,
        kinds.TIMEOUT,
        kinds.OUT_OF_MEMORY,
        kinds.BAD_RESULT,
        # A tool of an MCP server failed; the next call reaches a restarted server.
        kinds.TOOL_FAILED,
        kinds.MCP_UNAVAILABLE,
    }
)
# Longer than any tool's name.
_NAME_CHARS: Final = 200


class Tools:
    """The tools of one trajectory, which run in the reward service's processes."""

    def __init__(
        self,
        names: Iterable[str],
        backend: ToolBackend,
        definitions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._expected_seconds = 0.0
        self._names = frozenset(names)
        self._backend = backend
        self._definitions = definitions

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as an argument of `Agent.chat(..., tools=...)`: name, docstring, and the JSON
        schema derived from the type hints of a `@troupe.tool`."""
        return [dict(one) for one in self._definitions]

    def expecting(self, seconds: float) -> Tools:
        """Return the same tools for calls that take about `seconds` with the tool's fewest cores.

        `await tools.expecting(90.0).call("run_tests", files=files)`: this estimate for the order of
        calls and the number of their cores overrides the tool's declaration (`seconds_per`) and the
        estimate from earlier calls. A longer call is not cut off. Raises `ToolError` of kind
        `bad_estimate`.
        """
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < math.inf:
            raise ToolError(
                f"{seconds!r} seconds is not a valid estimate for a call",
                kind="bad_estimate",
                field="seconds",
                value=seconds,
                remedy="Give its seconds with the fewest cores, or 0 if unknown.",
            )
        same = copy(self)
        same._expected_seconds = float(seconds)
        return same

    async def run(self, call: ToolCall) -> dict[str, Any]:
        """Carry out a tool call of a reply, and return the message with its result.

        Errors of the model (an unknown tool, malformed arguments, a failed call) are also returned
        as a message. Other `ToolError`s are raised.
        """
        try:
            arguments = parse_json(call.arguments or "{}")
            if not isinstance(arguments, dict):
                raise NotJsonError(f"a JSON object is needed, not {type(arguments).__name__}")
            result = await self.call(call.name, **arguments)
        except NotJsonError as error:
            result = f"error: the arguments are not a JSON object: {error}"
        except ToolError as error:
            if error.kind not in _MODEL_ERRORS:
                raise
            result = f"error: {error.message}"
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a tool and return its JSON value.

        Raises `ToolError`; its `kind` tells a wrong call (`unknown_tool`, `bad_arguments`) from a
        failed call (`raised`, `timeout`, `out_of_memory`, ...). The tool's timeout bounds the call.
        """
        name = safe_text(name, _NAME_CHARS)
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            raise ToolError(
                f"the job has no tool '{name}'; known: {known}",
                kind=kinds.UNKNOWN_TOOL,
                field="tools",
                value=name,
                remedy=f"Declare it under `tools.{name}` in the job.",
            )
        try:
            payload = json_text(arguments)
        except NotJsonError as error:
            raise ToolError(
                f"arguments of tool '{name}' are not JSON: {error}",
                kind=kinds.BAD_ARGUMENTS,
                field=f"tools.{name}",
                value=arguments,
                remedy="Pass strings, finite numbers, booleans, None, lists and dicts only.",
            ) from error
        with numbering.outside():
            expected = self._expected_seconds
            answer = await self._backend.invoke(name, payload, expected_seconds=expected)
        return result_of(f"tools/{name}", answer)


def result_of(name: str, answer: str) -> Any:
    """Return the JSON value that a call of the function `name` ("tools/NAME", "rewards/NAME")
    returned. Raises `ToolError`."""
    try:
        return parse_json(answer)
    except NotJsonError as error:
        raise ToolError(
            f"{name} returned a value that is not JSON: {error}",
            kind=kinds.BAD_RESULT,
            field=name.replace("/", "."),
            remedy="Return finite numbers, strings, lists and dicts of them.",
        ) from error
