# mypy: ignore-errors
"""LangChain's agent, a LangGraph graph, over chat completions."""

from __future__ import annotations

import json
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


request = json.load(sys.stdin)
model = ChatOpenAI(
    model=request["model"], base_url=request["base_url"], api_key=request["api_key"], max_retries=0
)
agent = create_agent(model, tools=[add], system_prompt="You add.")
result = agent.invoke({"messages": [{"role": "user", "content": request["question"]}]})
print(json.dumps({"answer": result["messages"][-1].content}))
