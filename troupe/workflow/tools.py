"""Calling the job's tools from a workflow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from troupe.workflow import numbering
from troupe.workflow.backend import ToolBackend
from troupe.workflow.errors import ToolError


class Tools:
    """The tools of one trajectory; what they do happens in the reward service's processes."""

    def __init__(self, names: Iterable[str], backend: ToolBackend) -> None:
        self._names = frozenset(names)
        self._backend = backend

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a tool and return its JSON value.

        Raises `ToolError`: `kind` tells a wrong call (`unknown_tool`, `bad_arguments`) from a
        failed one (`raised`, `timeout`, `out_of_memory`, ...). Ends by the tool's timeout.
        """
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            raise ToolError(
                f"the job has no tool '{name}'; known: {known}",
                kind="unknown_tool",
                field="tools",
                value=name,
                remedy=f"Declare it under `tools.{name}` in the job.",
            )
        try:
            payload = json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ToolError(
                f"arguments of tool '{name}' are not JSON: {error}",
                kind="bad_arguments",
                field=f"tools.{name}",
                value=arguments,
                remedy="Pass strings, finite numbers, booleans, None, lists and dicts only.",
            ) from error
        with numbering.outside():
            return json.loads(await self._backend.invoke(name, payload))
