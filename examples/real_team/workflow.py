"""The team: a writer drafts a sentence, a critic judges it, and the writer may try once more."""

from __future__ import annotations

from examples.real_team.tasks import FEWEST, MOST, kept
from troupe.workflow import Agents, Query, Tools

RULES = f"One sentence of {FEWEST} to {MOST} words."


async def write(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """The writer earns the share of the rules that each of its sentences keeps, the critic 1 for a
    right verdict, the team 1 when the last sentence keeps all rules."""
    topic = query["topic"]
    request = {"role": "user", "content": f"{query['request']} {RULES}"}
    draft = await agents["writer"].chat([request])
    rules = kept(topic, draft.text)
    verdict = await agents["critic"].chat(
        f"Rules: {RULES} It has the word {topic}.\nText: {draft.text}\n"
        "Does the text keep the rules? Answer yes or no."
    )
    said = verdict.text.strip().lower().rstrip(".")
    verdict.reward = float(said == ("yes" if all(rules.values()) else "no"))
    draft.reward = last = sum(rules.values()) / len(rules)
    if said == "no":
        again = {"role": "user", "content": f"That breaks a rule. {request['content']}"}
        final = await agents["writer"].chat([request, draft, again])
        rules = kept(topic, final.text)
        final.reward = last = sum(rules.values()) / len(rules)
    return {"writer": last, "critic": verdict.reward, "team": float(all(rules.values()))}
