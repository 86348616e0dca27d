"""An agent with a tool, in a Python environment without Troupe.

    python agent.py < request.json           one question: JSON in, a line of JSON out
    python agent.py --serve 8031             a server: POST the same JSON

This agent needs only the standard library. `autogen_agent.py` is the same agent with AutoGen.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Object = dict[str, Any]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MOST_TURNS = 4
# Ignore proxies in the environment: the endpoint is on loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def solve(request: Object) -> Object:
    """Ask the model, run its tool calls, and ask again."""
    messages = [{"role": "user", "content": request["question"]}]
    for _ in range(MOST_TURNS):
        message = complete(request, {"messages": messages, "tools": [ADD]})
        messages.append(message)
        if not message.get("tool_calls"):
            return {"answer": message["content"]}
        for call in message["tool_calls"]:
            content = run(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return {"answer": ""}


def run(call: Object) -> str:
    """Run a tool call; an error becomes the result, so that the model sees it."""
    try:
        arguments = json.loads(call["arguments"])
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, LookupError, TypeError) as error:
        return f"error: {error!r}"


def complete(request: Object, body: Object) -> Object:
    """Return the message of one completion."""
    asked = urllib.request.Request(
        request["base_url"] + "/chat/completions",
        data=json.dumps({"model": request["model"], **body}).encode(),
        headers={
            "authorization": f"Bearer {request['api_key']}",
            "content-type": "application/json",
        },
    )
    with OPENER.open(asked, timeout=100) as response:
        message: Object = json.load(response)["choices"][0]["message"]
        return message


def main(solve: Callable[[Object], Object]) -> None:
    """Answer one question from standard input, or run a server on loopback."""
    if sys.argv[1:2] == ["--serve"]:
        serve(solve, int(sys.argv[2]))
    print(json.dumps(solve(json.load(sys.stdin))), flush=True)


def serve(solve: Callable[[Object], Object], port: int) -> None:
    """Answer questions, each in its own thread, until the process ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = self.rfile.read(min(int(self.headers["content-length"]), 1 << 20))
                status, answer = 200, solve(json.loads(body))
            except Exception as error:  # the trajectory fails, the server continues
                status, answer = 500, {"error": repr(error)}
            said = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(solve)
