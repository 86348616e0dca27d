# mypy: ignore-errors
"""The agent of `agent.py`, written with AutoGen. AutoGen needs protobuf 5 and Troupe 7, so it has a
separate Python environment without Troupe.

    python -m venv autogen && autogen/bin/pip install autogen-agentchat "autogen-ext[openai]"
    EXAMPLE_AGENT_PYTHON=autogen/bin/python EXAMPLE_AGENT_PROGRAM=.../autogen_agent.py troupe ...
"""

from __future__ import annotations

import asyncio

from agent import main  # beside this file
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

# AutoGen knows these properties for OpenAI's models; ours have to be declared.
CAPABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def answer(request: dict) -> dict:
    """Return the last message of one run."""
    client = OpenAIChatCompletionClient(
        model=request["model"],
        base_url=request["base_url"],
        api_key=request["api_key"],
        model_info=CAPABILITIES,
        max_retries=0,
    )
    agent = AssistantAgent(
        "solver",
        model_client=client,
        tools=[add],
        reflect_on_tool_use=True,
        model_client_stream=True,
    )
    try:
        result = await agent.run(task=request["question"])
        return {"answer": result.messages[-1].content}
    finally:
        await client.close()


def solve(request: dict) -> dict:
    """Answer one request, as `agent.solve` does."""
    return asyncio.run(answer(request))


if __name__ == "__main__":
    main(solve)
