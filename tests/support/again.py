"""A workflow in which an agent is asked twice in one conversation, with its own first reply."""

from __future__ import annotations

from troupe.workflow import Agents, Query, Tools


async def write_again(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """`examples.real_team` with a second try of the writer: rewards are lengths of replies."""
    asked = {"role": "user", "content": query["request"]}
    draft = await agents["writer"].chat([asked])
    advice = await agents["editor"].chat(f"Rewrite this: {draft.text}")
    again = {"role": "user", "content": f"Write it like this: {advice.text}"}
    final = await agents["writer"].chat([asked, draft, again])
    return {"writer": float(len(final.text)), "editor": float(len(advice.text)), "team": 0.0}
