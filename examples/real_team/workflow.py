"""The team: a writer drafts a sentence, an editor rewrites it."""

from __future__ import annotations

from examples.real_team.tasks import FEWEST, MOST, kept
from troupe.workflow import Agents, Query, Tools

RULES = f"One sentence of {FEWEST} to {MOST} words."


async def write(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Reward writer and editor with the share of the rules that their text follows; the team
    succeeds if the editor's text follows all."""
    topic = query["topic"]
    draft = await agents["writer"].chat(f"{query['request']} {RULES}")
    edited = await agents["editor"].chat(
        f"Rewrite this text about a {topic}. {RULES}\n\n{draft.text.strip()}"
    )
    rules = kept(topic, draft.text), kept(topic, edited.text)
    query.log(draft_right=float(all(rules[0].values())))
    writer, editor = (sum(one.values()) / len(one) for one in rules)
    return {"writer": writer, "editor": editor, "team": float(all(rules[1].values()))}
