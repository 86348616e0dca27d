"""The team: the solver proposes, the checker criticises, the solver answers again."""

from __future__ import annotations

from examples.reasoning_team.prompts import criticise, propose
from troupe.workflow import Agents, Query, Tools


async def solve(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """One conversation. Every turn is rewarded for the answer that it gives.

    The team has solved the query when the solver's final answer is right.
    """
    question = query["question"]
    draft = await agents["solver"].chat(propose(question))
    critique = await agents["checker"].chat(criticise(question, draft.text))
    # The reply stands in the list as it is: its token ids are reused, not tokenised again.
    final = await agents["solver"].chat(
        [*propose(question), draft, {"role": "user", "content": critique.text}]
    )
    first, advised, last = await tools.call(
        "score",
        dataset=query["dataset"],
        entry=query["entry"],
        answers=[draft.text, critique.text, final.text],
    )
    draft.reward, critique.reward, final.reward = first, advised, last
    query.log(first_answer=first, fixed=float(last > first), broken=float(last < first))
    return {"solver": last, "checker": advised, "team": last}
