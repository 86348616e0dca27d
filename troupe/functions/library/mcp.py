"""Tools of MCP servers: a job's `tools.X.mcp` runs `call` in worker processes.

A process keeps its connections, and the servers that it started, between calls; the next call
reopens a broken connection. This module does not end a call that hangs: the reward service ends the
process, and the servers with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from string import Template
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from troupe.contracts import kinds
from troupe.functions.declaration import tool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock

# Maximum number of connections of one process; the least recently used one is closed.
_MOST_CONNECTIONS: Final = 16
# Maximum number of tools listed per server.
_MOST_TOOLS: Final = 1000
# After this time without a call, a connection is tested before use.
_TRUSTED_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0
_NO_REASON: Final = "the tool failed without giving a reason"


class McpError(Exception):
    """A failed call of an MCP server's tool; `kind` is the kind of the workflow's `ToolError`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


@tool(cores=0, memory_mib=0, timeout_seconds=60)
def call(
    server: dict[str, Any], name: str = "", arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Call the tool `name` of a server (a job's `tools.X.mcp`); without a name, list its tools.

    Return {"tools": [{"name", "description", "parameters"}]}, {"result": text or JSON}, or
    {"error": kind, "message": text}.
    """
    try:
        answer: dict[str, Any] = _connections().call(server, name, arguments or {})
    except McpError as error:
        return {"error": error.kind, "message": error.message}
    return answer


# The connections, with their thread and servers, outlive a call.
call.keeps_running = True  # type: ignore[attr-defined]


class McpTool:
    """One tool of a server as a function of this process (`troupe workflow try`)."""

    def __init__(self, server: dict[str, Any], listed: Mapping[str, Any], declared_as: str) -> None:
        self.server, self.listed = server, listed
        self.declared_as = declared_as
        """The server's name among the job's tools."""

    def __call__(self, /, **arguments: Any) -> Any:
        """Return the result. Raises `McpError`."""
        return _connections().call(self.server, self.listed["name"], arguments)["result"]


def tools_of(server: dict[str, Any], declared_as: str) -> list[McpTool]:
    """Return the tools of a server. Raises `McpError`."""
    listed = _connections().call(server, "", {})["tools"]
    return [McpTool(server, one, declared_as) for one in listed]


class McpConnections:
    """The open connections of one process, served by a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        self._open: OrderedDict[str, _Connection] = OrderedDict()

    def call(self, server: Mapping[str, Any], name: str, arguments: dict[str, Any]) -> Any:
        """Return the answer of `call`. Raises `McpError`."""
        work = self._call(server, name, arguments)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _call(self, server: Mapping[str, Any], name: str, arguments: dict[str, Any]) -> Any:
        key = json.dumps(server, sort_keys=True)
        connection = self._open.get(key)
        if connection is not None and not await connection.is_alive():
            await self._close(key, connection)
            connection = None
        if connection is None:
            connection = _Connection(server)
            await connection.open()
            self._open[key] = connection
            if len(self._open) > _MOST_CONNECTIONS:
                await self._close(*next(iter(self._open.items())))
        self._open.move_to_end(key)
        if not name:
            return {"tools": connection.tools}
        try:
            return {"result": await connection.call(name, arguments)}
        except McpError as error:
            if error.kind == kinds.MCP_UNAVAILABLE:
                await self._close(key, connection)
            raise

    async def _close(self, key: str, connection: _Connection) -> None:
        # Of several calls that find it broken, one may have opened a new one already.
        if self._open.get(key) is connection:
            del self._open[key]
        await connection.close()


_made: McpConnections | None = None


def _connections() -> McpConnections:
    global _made
    if _made is None:
        _made = McpConnections()
    return _made


class _Connection:
    """A connection to one server, held by a separate task, as its cancel scopes require."""

    def __init__(self, server: Mapping[str, Any]) -> None:
        self._server = server
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self.tools: list[dict[str, Any]] = []
        """Its tools: `name`, `description`, `parameters` (a JSON schema)."""

    async def open(self) -> None:
        """Start or reach the server, and list its tools. Raises `McpError`."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(opened))
        seconds = self._server["start_seconds"]
        try:
            await asyncio.wait_for(asyncio.shield(opened), seconds)
        except Exception as error:
            await self.close()
            raise self._unavailable(f"did not answer within {seconds:g} s", error) from error

    async def is_alive(self) -> bool:
        """Return whether the server answers, if that is in doubt."""
        if self._holding is None or self._holding.done():
            return False
        return time.monotonic() - self._used < _TRUSTED_SECONDS or await self._answers()

    async def _answers(self) -> bool:
        try:
            await asyncio.wait_for(self._listed(), self._server["start_seconds"])
        except Exception:
            return False
        return True

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return its result, as converted by `_shown`. Raises `McpError`."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        known = [one["name"] for one in self.tools]
        if name not in known:
            raise McpError(kinds.UNKNOWN_TOOL, f"the server has no tool '{name}'; known: {known}")
        assert self._client is not None, "it is open"
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            # Servers may also use its code for their own errors: JSON-RPC allows it.
            if error.code == CONNECTION_CLOSED and not await self._answers():
                raise self._unavailable("ended during the call", error) from error
            kind = kinds.BAD_ARGUMENTS if error.code == INVALID_PARAMS else kinds.TOOL_FAILED
            raise McpError(kind, error.message or _NO_REASON) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            text = f"the server's answer is not the result of a tool: {where}: {first['msg']}"
            raise McpError(kinds.TOOL_FAILED, text) from error
        # The tool's output schema does not allow the result.
        except (ValueError, RuntimeError) as error:
            raise McpError(kinds.TOOL_FAILED, f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise self._unavailable("cannot be reached", error) from error
        finally:
            self._used = time.monotonic()
        return _shown(result)

    async def close(self) -> None:
        """Close the connection, and end a server that was started for it."""
        self._closing.set()
        if self._holding is not None:
            if not self.tools:  # it may still be waiting for the server
                self._holding.cancel()
            await asyncio.wait({self._holding}, timeout=_CLOSE_SECONDS)
            self._holding.cancel()

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        try:
            async with _client(self._server) as self._client:
                self.tools = await self._listed()
                if not opened.done():
                    opened.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
                opened.exception()  # marked as retrieved, even if nothing waits for it any more
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _listed(self) -> list[dict[str, Any]]:
        assert self._client is not None, "it is open"
        tools: list[dict[str, Any]] = []
        cursor = None
        while len(tools) < _MOST_TOOLS:
            page = await self._client.list_tools(cursor=cursor, cache_mode="bypass")
            for one in page.tools:
                about = {"name": one.name, "description": one.description or ""}
                tools.append({**about, "parameters": one.input_schema})
            cursor = page.next_cursor
            if not cursor:
                break
        self._used = time.monotonic()
        return tools

    def _unavailable(self, late: str, error: BaseException) -> McpError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, McpError):
            return error
        if isinstance(error, ImportError):
            return McpError(kinds.MCP_UNAVAILABLE, f"{error}: `pip install 'troupe-rl[mcp]'`")
        shown = self._server["url"] or " ".join(self._server["command"])
        reason = "" if isinstance(error, TimeoutError) else f" ({type(error).__name__}: {error})"
        what = late if isinstance(error, TimeoutError) or "during" in late else "does not start"
        return McpError(kinds.MCP_UNAVAILABLE, f"the MCP server `{shown}` {what}{reason}")


def _shown(result: CallToolResult) -> Any:
    """Return the part of a result that the model sees: its text, or its JSON if it has no text.

    Parts intended only for the user are left out, except for the reason of a failure. Raises
    `McpError` for a failed call.
    """
    parts = [part for part in result.content if result.is_error or _is_for_the_model(part)]
    structured = result.structured_content
    if structured is not None and not any(_text_of(part) for part in parts):
        if not result.is_error:
            return structured
        text = json.dumps(structured, ensure_ascii=False)
    else:
        text = "\n".join(_text_of(part) or _placeholder(part) for part in parts)
    if result.is_error:
        raise McpError(kinds.TOOL_FAILED, text or _NO_REASON)
    return text


def _is_for_the_model(part: ContentBlock) -> bool:
    audience = None if part.annotations is None else part.annotations.audience
    return not audience or "assistant" in audience


def _text_of(part: ContentBlock) -> str:
    """Return the text of a part; empty if it has none."""
    match part.type:
        case "text":
            return part.text
        case "resource":
            return getattr(part.resource, "text", "")
        case "resource_link":
            about = f" ({part.description})" if part.description else ""
            return f"{part.title or part.name}: {part.uri}{about}"
        case _:
            return ""


def _placeholder(part: ContentBlock) -> str:
    """Name a part that is not text."""
    match part.type:
        case "resource":
            blob = getattr(part.resource, "blob", "")
            kind = part.resource.mime_type or "binary"
            return f"({part.resource.uri}: {kind}, not shown)" if blob else ""
        case "image" | "audio":
            return f"({part.type}: {part.mime_type}, not shown)"
        case _:
            return ""


@asynccontextmanager
async def _client(server: Mapping[str, Any]) -> AsyncIterator[Client]:
    """Open a client of the server. Raises `McpError` for a variable that is not set."""
    from mcp import Client, StdioServerParameters, stdio_client

    if server["url"] is None:
        command, *args = server["command"]
        # Like this process's own environment, which the reward service has chosen already.
        env = {**os.environ, **_filled(server["env"])}
        parameters = StdioServerParameters(command=command, args=args, env=env)
        async with Client(stdio_client(parameters, errlog=sys.stderr)) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # Reading is bounded by the call's own time limit.
    limits = httpx2.Timeout(server["start_seconds"], read=None)
    async with httpx2.AsyncClient(headers=_filled(server["headers"]), timeout=limits) as http:
        transport = streamable_http_client(server["url"], http_client=http)
        async with Client(transport) as client:
            yield client


def _filled(values: Mapping[str, str]) -> dict[str, str]:
    """Return `values` with `$NAME` replaced by variables of the environment. Raises `McpError`."""
    try:
        return {name: Template(value).substitute(os.environ) for name, value in values.items()}
    except KeyError as error:
        raise McpError(
            kinds.MCP_UNAVAILABLE,
            f"the environment variable {error.args[0]} is not set where tools run; see "
            "TROUPE_REWARD_ENVIRONMENT",
        ) from None
