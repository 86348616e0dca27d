"""Tree sampling: draw several candidates for a turn, score each, continue with one.

AT-GRPO (Zhao et al. 2025, section 4.1, tree-structured sampling): k candidates are drawn from one
prompt, each gets a reward, and the best is carried out; the k form the group of each
(`algorithm.group_by: branch`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from troupe.workflow.agent import Agent, Messages
from troupe.workflow.errors import InvalidMessagesError, shown
from troupe.workflow.messages import Reply, finite

Score = Callable[[Reply], float | Awaitable[float]]
"""The reward of one candidate; may be async, and call tools or other agents."""
Choose = Literal["best", "sample"] | Callable[[Sequence[Reply]], Reply]


async def branch(
    agent: Agent,
    messages: Messages,
    *,
    n: int,
    score: Score,
    choose: Choose = "best",
    greediness: float = 1.0,
    **sampling: Any,
) -> Reply:
    """Draw `n` replies to `messages`, reward each with `score`, return the one to continue with.

    `choose`: `best`, the first of those with the highest reward; `sample`, one drawn with
    probability proportional to exp(`greediness` * reward); or a function of the scored candidates.
    All n become samples with their own rewards; those that are not returned are in
    `reply.siblings`. Scores are computed concurrently; when one raises, the others are cancelled
    and it is raised. Raises what `chat` and `reply.reward` raise, and `InvalidMessagesError` for a
    `choose` that is none of these.
    """
    if choose not in ("best", "sample") and not callable(choose):
        raise _bad("choose", choose, '"best", "sample" or a function of the candidates')
    if not (isinstance(greediness, int | float) and 0 <= greediness < math.inf):
        raise _bad("greediness", greediness, "a finite number, at least 0 (all alike)")
    replies = await agent.chat(messages, n=n, **sampling)

    async def reward(reply: Reply) -> None:
        given = score(reply)
        value = await given if inspect.isawaitable(given) else given
        reply.reward = finite(value, f"the score of {reply.agent}[{reply.turn}]")

    try:
        async with asyncio.TaskGroup() as group:
            for reply in replies:
                group.create_task(reward(reply))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if callable(choose):
        chosen = choose(replies)
        if not any(chosen is reply for reply in replies):
            raise _bad("choose", chosen, "a function that returns one of the candidates")
        return chosen
    rewards = [reply.reward or 0.0 for reply in replies]
    highest = max(rewards)
    if choose == "best":
        return replies[rewards.index(highest)]
    weights = [math.exp(greediness * (reward - highest)) for reward in rewards]
    draw = random.Random(agent.draw_seed("choose", replies[0].prompt))
    return draw.choices(replies, weights)[0]


def _bad(field: str, value: object, wanted: str) -> InvalidMessagesError:
    return InvalidMessagesError(
        f"{field} cannot be {shown(value)}", field=field, value=value, remedy=f"Pass {wanted}."
    )
