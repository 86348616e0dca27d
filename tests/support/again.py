"""Workflows in which an agent is asked twice in one conversation, with its own first reply."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from troupe.workflow import Agents, Query, Tools


async def write_again(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """`examples.real_team` with a second try of the writer: rewards are lengths of replies."""
    asked = {"role": "user", "content": query["request"]}
    draft = await agents["writer"].chat([asked])
    advice = await agents["editor"].chat(f"Rewrite this: {draft.text}")
    again = {"role": "user", "content": f"Write it like this: {advice.text}"}
    final = await agents["writer"].chat([asked, draft, again])
    return {"writer": float(len(final.text)), "editor": float(len(advice.text)), "team": 0.0}


async def write_by_endpoint(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """`write_again` with a writer that is an OpenAI client and knows texts only."""
    endpoint = agents["writer"].endpoint()
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

        async def write(*messages: Any) -> str:
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
            return reply.choices[0].message.content or ""

        asked = {"role": "user", "content": query["request"]}
        draft = await write(asked)
        advice = await agents["editor"].chat(f"Rewrite this: {draft}")
        again = {"role": "user", "content": f"Write it like this: {advice.text}"}
        final = await write(asked, {"role": "assistant", "content": draft}, again)
    return {"writer": float(len(final)), "editor": float(len(advice.text)), "team": 0.0}
