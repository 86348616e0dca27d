"""An MCP server with tools that work, fail, hang and crash; over HTTP where a port is given."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
