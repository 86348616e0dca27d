"""The workflow that Troupe runs: the agent on one query, with the endpoint as its model."""

from __future__ import annotations

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from examples.existing_agent.agent import QUESTION, Room, seeker
from troupe.workflow import Agents, Query, Tools

# One for all trajectories: creating a client takes a tenth of a second.
HTTP = DefaultAsyncHttpxClient()


async def play(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Run the agent once and reward the right letter."""
    endpoint = agents["seeker"].endpoint()
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=HTTP)
    model = OpenAIChatModel(endpoint.model, provider=OpenAIProvider(openai_client=client))
    room = Room(query["letter"])
    try:
        result = await seeker.run(
            QUESTION, deps=room, model=model, usage_limits=UsageLimits(request_limit=3)
        )
        said = result.output
    except AgentRunError:  # no answer, an unknown tool, or too many steps
        said = ""
    right = float(said == room.letter)
    query.log(looked=float(room.looked))
    return {"seeker": right, "team": right}
