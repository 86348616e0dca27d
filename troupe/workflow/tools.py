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

# Kinds of failures of the call itself, which `run` returns to the model; not of the service.
_MODEL_ERRORS: Final = frozenset(
    {
        kinds.UNKNOWN_TOOL,
        kinds.BAD_ARGUMENTS,
        kinds.RAISED,
        kinds.TIMEOUT,
        kinds.OUT_OF_MEMORY,
        kinds.BAD_RESULT,
        # Of a tool of an MCP server; the next call reaches a server that was started anew.
        kinds.TOOL_FAILED,
        kinds.MCP_UNAVAILABLE,
    }
)
# Longer than any tool's name.
_NAME_CHARS: Final = 200


class Tools:
    """The tools of one trajectory, which run in processes of the reward service."""

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
        """The tools as `Agent.chat(..., tools=...)` takes them: name, docstring, and the JSON
        schema that the type hints of a `@troupe.tool` give."""
        return [dict(one) for one in self._definitions]

    def expecting(self, seconds: float) -> Tools:
        """The same tools, whose calls take about `seconds` with the fewest cores of their tool.

        `await tools.expecting(90.0).call("run_tests", files=files)`: an estimate for the order of
        calls and the number of their cores, better than the tool's declaration (`seconds_per`) and
        earlier calls. A call that takes longer is not cut off. Raises `ToolError` of kind
        `bad_estimate`.
        """
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < math.inf:
            raise ToolError(
                f"a call cannot be expected to take {seconds!r} seconds",
                kind="bad_estimate",
                field="seconds",
                value=seconds,
                remedy="Say how long it takes with the fewest cores; 0 where that is unknown.",
            )
        same = copy(self)
        same._expected_seconds = float(seconds)
        return same

    async def run(self, call: ToolCall) -> dict[str, Any]:
        """Carry out a tool call of a reply; returns the message with its result.

        Errors of the model (an unknown tool, malformed arguments, a failed call) are returned as
        a message, too. Other `ToolError`s are raised.
        """
        try:
            arguments = parse_json(call.arguments or "{}")
            if not isinstance(arguments, dict):
                raise NotJsonError(f"a JSON object is needed, not {type(arguments).__name__}")
            result = await self.call(call.name, **arguments)
        except NotJsonError as error:
            result = f"error: the arguments are no JSON object: {error}"
        except ToolError as error:
            if error.kind not in _MODEL_ERRORS:
                raise
            result = f"error: {error.message}"
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a tool and return its JSON value.

        Raises `ToolError`; its `kind` is that of a wrong call (`unknown_tool`, `bad_arguments`) or
        of a failed one (`raised`, `timeout`, `out_of_memory`, ...). Bounded by the tool's timeout.
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
        try:
            return parse_json(answer)
        except NotJsonError as error:
            raise ToolError(
                f"tools/{name} answered what is no JSON: {error}",
                kind=kinds.BAD_RESULT,
                field=f"tools.{name}",
                remedy="Return finite numbers, strings, lists and dicts of them.",
            ) from error
