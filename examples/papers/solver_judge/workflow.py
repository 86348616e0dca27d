"""A solver writes two sentences under rules and a judge picks one, or a solver works alone.

The judge reads the drafts in both orders. A judge that always says the same letter then earns as
much for the one as it loses for the other, so learning does not drift to a letter.

workflow: examples.papers.solver_judge.workflow:workflow
tasks: {source: "examples.papers.solver_judge.workflow:Sentences"}
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

from examples.real_team.tasks import FEWEST, MOST, Tasks, has, kept
from troupe.workflow import Agents, Query, Tools

# By place. In this order the untrained model says either about as often.
LETTERS: Final = ("B", "A")
# What the judge earns where neither draft is better: a letter is right, a coin would do.
_EVEN: Final = 0.5


class Sentences(Tasks):
    """Queries `{"words"}`: two topics of one split, which the sentence is to have."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        one, other = (super(Sentences, self).__getitem__(at) for at in (index, index - 1))
        return {"words": [one["topic"], other["topic"]]}


def rules_of(words: Sequence[str]) -> str:
    """Return what the sentence is to be."""
    return f"one sentence of {FEWEST} to {MOST} words with the words {words[0]} and {words[1]}"


def solve(words: Sequence[str]) -> str:
    """Return the solver's question."""
    return f"Write {rules_of(words)}."


def judge(words: Sequence[str], drafts: Sequence[str]) -> str:
    """Return the judge's question."""
    listed = "\n\n".join(
        f"{letter}: {draft.strip()}" for letter, draft in zip(LETTERS, drafts, strict=True)
    )
    return f"Which text is better, if it is to be {rules_of(words)}?\n\n{listed}\n\nAnswer B or A."


def scored(words: Sequence[str], text: str) -> float:
    """Return a draft's reward, the share of four rules that it follows; 1 is success."""
    rules = kept(words[0], text)
    return statistics.fmean([*rules.values(), has(words[1], text)])


def pick(text: str) -> int | None:
    """Return the place of the draft that the judge's answer names; None if it names none."""
    letter = text.strip()
    return LETTERS.index(letter) if letter in LETTERS else None


def verdict_reward(picked: int | None, scores: Sequence[float]) -> float:
    """Return the judge's reward: 1 for the better of two drafts, 0 for the worse or for none."""
    if picked is None:
        return 0.0
    if scores[0] == scores[1]:
        return _EVEN
    return float(scores[picked] == max(scores))


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Reward every draft by its score, and every verdict for the better pick; the team succeeds if
    the draft with more verdicts (the first, if they are as many) follows all rules."""
    words = query["words"]
    question = solve(words)
    number = len(LETTERS) if "judge" in agents else 1
    drafts = await asyncio.gather(*(agents["solver"].chat(question) for _ in range(number)))
    scores = [scored(words, draft.text) for draft in drafts]
    for draft, score in zip(drafts, scores, strict=True):
        draft.reward = score
    query.log(draft_right=statistics.fmean(score == 1.0 for score in scores))
    winner = 0
    if "judge" in agents:
        orders = list(permutations(range(number)))
        verdicts = await asyncio.gather(
            *(
                agents["judge"].chat(judge(words, [drafts[at].text for at in order]))
                for order in orders
            )
        )
        votes, earned = [0] * number, []
        for verdict, order in zip(verdicts, orders, strict=True):
            place = pick(verdict.text)
            picked = None if place is None else order[place]
            verdict.reward = verdict_reward(picked, scores)
            earned.append(verdict.reward)
            if picked is not None:
                votes[picked] += 1
        winner = votes.index(max(votes))
        if scores[0] != scores[1]:
            query.log(judged_right=statistics.fmean(earned))
    return {"team": float(scores[winner] == 1.0)}
