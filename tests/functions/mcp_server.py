"""An MCP server with tools that work, fail, hang and crash; over HTTP where a port is given."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool()
def process() -> str:
    """The id of the server's process."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "none")


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Takes a minute."""
    time.sleep(60)
    return "late"


CONTENTS: dict[str, CallToolResult] = {}


def _answers(name: str, *parts: dict[str, Any], **result: Any) -> None:
    CONTENTS[name] = CallToolResult.model_validate({"content": parts, **result})


_PAGE = {"uri": "file:///notes/today.md", "mimeType": "text/markdown", "text": "# Today\nrain"}
_FOR_USER = {"annotations": {"audience": ["user"]}}
_FOR_BOTH = {"annotations": {"audience": ["user", "assistant"], "priority": 0.5}}
_LINK = {"type": "resource_link", "name": "today.md", "uri": "file:///notes/today.md"}
_IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
_answers("text", {"type": "text", "text": "one"}, {"type": "text", "text": "two"})
_answers("empty")
_answers("empty text", {"type": "text", "text": ""})
_answers("resource", {"type": "text", "text": "found:"}, {"type": "resource", "resource": _PAGE})
_answers("blob", {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AAAA"}})
_answers(
    "typed blob",
    {
        "type": "resource",
        "resource": {"uri": "file:///a.pdf", "blob": "AAAA", "mimeType": "application/pdf"},
    },
)
_answers("link", _LINK)
_answers("titled link", {**_LINK, "title": "Today", "description": "what happens"})
_answers("image", _IMAGE)
_answers("audio", {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"})
_answers("structured", structuredContent={"rows": [1, 2]})
_answers("structured image", _IMAGE, structuredContent={"width": 3})
_answers("text and structured", {"type": "text", "text": "two"}, structuredContent={"n": 2})
_answers("for the user", {"type": "text", "text": "hello", **_FOR_USER})
_answers(
    "for both",
    {"type": "text", "text": "seen", **_FOR_BOTH},
    {"type": "text", "text": "unseen", **_FOR_USER},
)
_answers("error", {"type": "text", "text": "no such page"}, isError=True)
_answers("error resource", {"type": "resource", "resource": _PAGE}, isError=True)
_answers("error structured", structuredContent={"code": 7}, isError=True)
_answers("error without a reason", isError=True)
_answers("error for the user", {"type": "text", "text": "quota spent", **_FOR_USER}, isError=True)


@server.tool()
def content(name: str) -> CallToolResult:
    """A result with parts of a kind."""
    return CONTENTS[name]


@server.tool()
def unlike_its_schema() -> CallToolResult:
    """Says that it returns a number, and returns a text."""
    return CallToolResult.model_validate({"content": [], "structuredContent": {"number": "x"}})


server._tool_manager.get_tool("unlike_its_schema").fn_metadata.output_schema = {  # type: ignore[union-attr]
    "type": "object",
    "properties": {"number": {"type": "number"}},
    "required": ["number"],
}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
