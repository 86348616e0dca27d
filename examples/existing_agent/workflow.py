"""What Troupe runs: the agent on one query, its model behind the trajectory's own address."""

from __future__ import annotations

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from examples.existing_agent.agent import QUESTION, Room, seeker
from troupe.workflow import Agents, Query, Tools

# One for all trajectories: a client of its own costs each a tenth of a second.
HTTP = DefaultAsyncHttpxClient()


async def play(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """One run of the agent, which is paid for the right letter."""
    endpoint = agents["seeker"].endpoint()
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=HTTP)
    model = OpenAIChatModel(endpoint.model, provider=OpenAIProvider(openai_client=client))
    room = Room(query["letter"])
    try:
        result = await seeker.run(
            QUESTION, deps=room, model=model, usage_limits=UsageLimits(request_limit=3)
        )
        said = result.output
    except AgentRunError:  # it said nothing, called a tool that is not there, or never ended
        said = ""
    right = float(said == room.letter)
    query.log(looked=float(room.looked))
    return {"seeker": right, "team": right}
