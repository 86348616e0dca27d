"""The team as a tree: at each turn several candidates, each scored, the best of which goes on."""

from __future__ import annotations

from typing import Final

from examples.reasoning_team.prompts import criticise, propose
from troupe.workflow import Agents, Query, Reply, Tools, branch

CANDIDATES: Final = 4


async def solve(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """One conversation. Every candidate is rewarded for the answer that it gives.

    Who is examined gets one try per turn: there is nobody to tell which candidate is the best.
    """
    question = query["question"]
    n = CANDIDATES if query.split == "train" else 1

    async def score(reply: Reply) -> float:
        [right] = await tools.call(
            "score", dataset=query["dataset"], entry=query["entry"], answers=[reply.text]
        )
        return float(right)

    draft = await branch(agents["solver"], propose(question), n=n, score=score)
    critique = await branch(agents["checker"], criticise(question, draft.text), n=n, score=score)
    final = await branch(
        agents["solver"],
        # The chosen draft stands in the list as it is: its token ids are reused.
        [*propose(question), draft, {"role": "user", "content": critique.text}],
        n=n,
        score=score,
    )
    solved = final.reward or 0.0
    query.log(first_answer=draft.reward or 0.0)
    return {"solver": solved, "checker": critique.reward or 0.0, "team": solved}
