"""An MCP server without a library, whose tools answer with messages that libraries do not send."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOLS = [
    {"name": name, "description": "", "inputSchema": {"type": "object"}}
    for name in ("process", "answer", "third")
]
calls = 0


def _handled(message: dict[str, Any]) -> dict[str, Any] | None:
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            about = {"serverInfo": {"name": "raw", "version": "1"}, "capabilities": {"tools": {}}}
            return {"result": {"protocolVersion": version, **about}}
        case "tools/list":
            return {"result": {"tools": TOOLS}}
        case "tools/call":
            return _called(**message["params"])
        case _:
            return {"result": {}}


def _called(name: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any] | None:
    match name:
        case "process":
            return {"result": {"content": [{"type": "text", "text": str(os.getpid())}]}}
        case "answer":
            return arguments
        case _:
            # The third call ends the server, and with it the two that it does not answer.
            global calls
            calls += 1
            return None if calls < 3 else sys.exit(0)


for line in sys.stdin:
    received = json.loads(line)
    if "id" in received and (answer := _handled(received)) is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": received["id"], **answer}), flush=True)
