"""The team's conversation: the solver proposes, the checker criticises, the solver answers again.

Prompts are plain chat messages, whatever the model. `solve` is the workflow of `job.yaml`,
`solve_by_branches` (AT-GRPO) the workflow of `tree.yaml`.
"""

from __future__ import annotations

from typing import Final

from troupe.workflow import Agents, Query, Reply, Tools, branch

Message = dict[str, str]
# Of `solve_by_branches`, per turn.
CANDIDATES: Final = 4


def propose(question: str) -> list[Message]:
    """The solver's first turn."""
    return [{"role": "user", "content": question}]


def criticise(question: str, proposal: str) -> list[Message]:
    """The checker's turn: it answers with what it holds to be right."""
    return [{"role": "user", "content": f"{question}\nanswer: {proposal}"}]


def revise(question: str, proposal: str, critique: str) -> list[Message]:
    """The solver's second turn: its own proposal, then the critique."""
    return [
        *propose(question),
        {"role": "assistant", "content": proposal},
        {"role": "user", "content": critique},
    ]


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
        answer=query["answer"],
        answers=[draft.text, critique.text, final.text],
    )
    draft.reward, critique.reward, final.reward = first, advised, last
    query.log(first_answer=first, fixed=float(last > first), broken=float(last < first))
    return {"solver": last, "checker": advised, "team": last}


async def solve_by_branches(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """One conversation as a tree: at each turn several candidates, the best of which goes on.
    Every candidate is rewarded for the answer that it gives.

    Who is examined gets one try per turn: there is nobody to tell which candidate is the best.
    """
    question = query["question"]
    n = CANDIDATES if query.split == "train" else 1

    async def score(reply: Reply) -> float:
        [right] = await tools.call("score", answer=query["answer"], answers=[reply.text])
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
