"""Tools and reward functions that run in this process, with the errors of the reward service."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from troupe.contracts import kinds
from troupe.outcomes import NotJsonError, described, json_text, parse_json, shown, traceback_text
from troupe.workflow import scoring
from troupe.workflow.errors import ToolError
from troupe.workflow.trying.limits import time_limit

Function = Callable[..., Any]


class LocalFunctions:
    """`ToolBackend` and `Scorer` over plain functions; arguments and results are JSON.

    There is no memory limit. A function that does not end within `seconds` continues in a daemon
    thread, which does not keep the process alive.
    """

    def __init__(
        self,
        tools: Mapping[str, Function],
        rewards: Mapping[str, Function],
        *,
        seconds: Mapping[str, float] | float = 60.0,
    ) -> None:
        """Take functions by name. `seconds`: time limit of a call, for all or by `tools/name` and
        `rewards/name`."""
        self._functions = {
            **{f"tools/{name}": function for name, function in tools.items()},
            **{f"rewards/{name}": function for name, function in rewards.items()},
        }
        self._seconds = seconds

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        """Call a tool; `expected_seconds` is ignored. Raises `ToolError`."""
        return await self._call(f"tools/{name}", arguments_json)

    async def score(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a reward function. Raises `ToolError`."""
        return parse_json(await self._call(f"rewards/{name}", scoring.as_arguments(arguments)))

    async def _call(self, name: str, arguments_json: str) -> str:
        limit = self._seconds if isinstance(self._seconds, float | int) else self._seconds[name]
        field = name.replace("/", ".")
        try:
            async with time_limit(limit):
                result = await _in_thread(self._functions[name], json.loads(arguments_json))
        except TimeoutError as error:
            raise ToolError(
                f"{name} gave no result within {limit:g} s",
                kind=kinds.TIMEOUT,
                field=field,
                remedy="Raise its `timeout_seconds`, or make it faster.",
            ) from error
        except _Raised as raised:
            raise ToolError(
                f"{name}: {described(raised.error)}",
                kind=kinds.RAISED,
                field=field,
                traceback=traceback_text(raised.error, hidden=__file__),
            ) from raised.error
        try:
            return json_text(result)
        except NotJsonError as error:
            raise ToolError(
                f"{name}: {error}: the function returned {shown(result, 200)}",
                kind=kinds.BAD_RESULT,
                field=field,
                remedy="Return finite numbers, strings, lists and dicts of them.",
            ) from error


class _Raised(Exception):
    """Wraps an exception of the function, to tell it from a timeout of the call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _in_thread(function: Function, arguments: dict[str, Any]) -> Any:
    """Return the result of a call in a daemon thread; threads of the default executor would delay
    the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_Raised(error))

    def run() -> None:
        result, failed = None, None
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="troupe-function", daemon=True).start()
    return await future


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
