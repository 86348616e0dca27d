# mypy: ignore-errors
"""A tool-calling agent of smolagents over chat completions."""

from __future__ import annotations

import json
import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the one
        b: the other
    """
    return a + b


request = json.load(sys.stdin)
model = OpenAIServerModel(
    request["model"], api_base=request["base_url"], api_key=request["api_key"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
print(json.dumps({"answer": str(agent.run(request["question"]))}))
