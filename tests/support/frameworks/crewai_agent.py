# mypy: ignore-errors
"""A crew of one CrewAI agent over chat completions."""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"CREWAI_TRACING_ENABLED": "false", "CREWAI_DISABLE_TELEMETRY": "true"}
os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


request = json.load(sys.stdin)
model = LLM(
    model=f"openai/{request['model']}", base_url=request["base_url"], api_key=request["api_key"]
)
agent = Agent(role="solver", goal="Add.", backstory="You add.", tools=[add], llm=model, max_iter=4)
task = Task(description=request["question"], expected_output="a number", agent=agent)
print(json.dumps({"answer": Crew(agents=[agent], tasks=[task]).kickoff().raw}))
