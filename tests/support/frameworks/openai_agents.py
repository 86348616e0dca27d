# mypy: ignore-errors
"""OpenAI Agents SDK over the Responses API."""

from __future__ import annotations

import json
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


request = json.load(sys.stdin)
client = AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"])
model = OpenAIResponsesModel(request["model"], openai_client=client)
agent = Agent(name="solver", instructions="You add.", tools=[add], model=model)
print(json.dumps({"answer": Runner.run_sync(agent, request["question"]).final_output}))
