"""Several candidates for one turn: `branch` for one agent, `joint` for a team.

Both draw n replies per agent, reward them, and return the replies with which the workflow
continues.

joint: MAGRPO (Liu et al. 2025, "LLM collaboration with multi-agent reinforcement learning"), whose
    joint modes follow CoMLRL's trainer. With replies y_k^1, ..., y_k^n of agent k, and the
    reward R of a joint answer (one reply of each agent), the reward of a reply is

    aligned: R(y_1^j, ..., y_m^j) for y_k^j, n joint answers;
    cross: the mean of R over the n^(m-1) joint answers that contain the reply, of n^m. (CoMLRL adds
        them up, which multiplies rewards by n^(m-1).)

    With `group_by: branch` and `dr_grpo`, A = R - mean R over the agent's n replies. Both modes
    have the same expected gradient; `cross` averages over what the others said, which costs scores,
    not tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from troupe.workflow.agent import Agent, Messages
from troupe.workflow.errors import InvalidMessagesError, shown
from troupe.workflow.messages import Reply, finite

T = TypeVar("T")
Score = Callable[[Reply], float | Awaitable[float]]
"""The reward of one candidate; may be async, and call tools or other agents."""
Choose = Literal["best", "sample"] | Callable[[Sequence[Reply]], Reply]
Joint = tuple[Reply, ...]
"""One reply of each agent."""
JointScore = Callable[[Joint], float | Awaitable[float]]
"""The reward of a joint answer; as `Score`."""
JointChoose = Literal["best", "sample"] | Callable[[Sequence[Joint]], Joint]
JointMode = Literal["aligned", "cross"]

# Joint answers of one call: far more than anybody scores.
_MOST_JOINT: Final = 65_536


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
    """Draw `n` replies to `messages`, reward each with `score`, and return the one to continue
    with: tree sampling (AT-GRPO, Zhao et al. 2025, section 4.1; `algorithm.group_by: branch`).

    `choose`: `best`, the first candidate with the highest reward; `sample`, a candidate drawn with
    probability proportional to exp(`greediness` * reward); or a function of the scored candidates.
    All n become samples with their own rewards; the other candidates are in `reply.siblings`.
    Scores are computed concurrently; when one raises, the others are cancelled and its error is
    raised. Raises what `chat` and `reply.reward` raise, and `InvalidMessagesError` for any other
    `choose`.
    """
    _check_choice(choose, greediness)
    replies = await agent.chat(messages, n=n, **sampling)

    async def reward(reply: Reply) -> None:
        reply.reward = await _number(score(reply), f"the score of {reply.agent}[{reply.turn}]")

    await _all(reward(reply) for reply in replies)
    rewards = [reply.reward or 0.0 for reply in replies]
    return _chosen(replies, rewards, choose, greediness, agent)


async def joint(
    prompts: Mapping[Agent, Messages] | Sequence[tuple[Agent, Messages]],
    *,
    n: int,
    score: JointScore,
    mode: JointMode = "aligned",
    choose: JointChoose = "best",
    greediness: float = 1.0,
    **sampling: Any,
) -> Joint:
    """Draw `n` replies of each agent to its messages, at the same time, reward joint answers with
    `score`, and return the one to continue with, in the order of `prompts`: MAGRPO.

    `mode`: which replies are scored together, and what each one's reward is: see the module. With
    `aligned` `score` is called n times, with `cross` n^m times for m agents. `choose`, the samples,
    concurrency and errors are as in `branch`, of joint answers. Raises `InvalidMessagesError` for
    another `mode`, no agent, an agent that comes twice, or more than 65,536 joint answers.
    """
    _check_choice(choose, greediness)
    asked = list(prompts.items() if isinstance(prompts, Mapping) else prompts)
    if not asked or len({agent.name for agent, _ in asked}) < len(asked):
        names = [agent.name for agent, _ in asked]
        raise _bad("prompts", names, "messages for one or several different agents")
    if mode not in ("aligned", "cross"):
        raise _bad("mode", mode, '"aligned" or "cross"')
    if mode == "cross" and isinstance(n, int) and n > 0 and n ** len(asked) > _MOST_JOINT:
        wanted = f"fewer than {n}: {len(asked)} agents would have {n ** len(asked):,} joint answers"
        raise _bad("n", n, f"{wanted}, of at most {_MOST_JOINT:,}; or use mode `aligned`")
    drawn: list[Sequence[Reply]] = [()] * len(asked)

    async def draw(k: int, agent: Agent, messages: Messages) -> None:
        drawn[k] = await agent.chat(messages, n=n, **sampling)

    await _all(draw(k, *one) for k, one in enumerate(asked))
    combinations = joint_answers(mode, n, len(asked))
    answers = [
        tuple(drawn[k][j] for k, j in enumerate(combination)) for combination in combinations
    ]
    found = [0.0] * len(answers)

    async def reward(i: int) -> None:
        members = ", ".join(f"{reply.agent}[{reply.turn}]" for reply in answers[i])
        found[i] = await _number(score(answers[i]), f"the score of {members}")

    await _all(reward(i) for i in range(len(answers)))
    for k, own in enumerate(rewards_of_replies(combinations, found, n)):
        for reply, value in zip(drawn[k], own, strict=True):
            reply.reward = value
    return _chosen(answers, found, choose, greediness, asked[0][0])


def joint_answers(mode: JointMode, n: int, agents: int) -> list[tuple[int, ...]]:
    """Return the joint answers of agents with `n` replies each, as the indices of the replies."""
    if mode == "aligned":
        return [(j,) * agents for j in range(n)]
    return list(itertools.product(range(n), repeat=agents))


def rewards_of_replies(
    answers: Sequence[Sequence[int]], rewards: Sequence[float], n: int
) -> list[list[float]]:
    """Return the reward of each agent's n replies: the mean of the joint answers with it.

    `answers`: of `joint_answers`, with their `rewards`.
    """
    found = []
    for k in range(len(answers[0])):
        mine: list[list[float]] = [[] for _ in range(n)]
        for answer, reward in zip(answers, rewards, strict=True):
            mine[answer[k]].append(reward)
        found.append([math.fsum(own) / len(own) for own in mine])
    return found


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of `work` at the same time; when one raises, cancel the others and raise its
    error."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _number(given: float | Awaitable[float], name: str) -> float:
    return finite(await given if inspect.isawaitable(given) else given, name)


def _check_choice(choose: object, greediness: object) -> None:
    if choose not in ("best", "sample") and not callable(choose):
        raise _bad("choose", choose, '"best", "sample" or a function of the candidates')
    if not (isinstance(greediness, int | float) and 0 <= greediness < math.inf):
        raise _bad("greediness", greediness, "a finite number, at least 0 (all alike)")


def _chosen(
    candidates: Sequence[T],
    rewards: Sequence[float],
    choose: Literal["best", "sample"] | Callable[[Sequence[T]], T],
    greediness: float,
    agent: Agent,
) -> T:
    """Return the candidate to continue with; `agent` draws for `sample`."""
    if callable(choose):
        chosen = choose(candidates)
        if not any(chosen is candidate for candidate in candidates):
            raise _bad("choose", chosen, "a function that returns one of the candidates")
        return chosen
    highest = max(rewards)
    if choose == "best":
        return candidates[rewards.index(highest)]
    first = candidates[0]
    prompt = first.prompt if isinstance(first, Reply) else first[0].prompt  # type: ignore[index]
    weights = [math.exp(greediness * (reward - highest)) for reward in rewards]
    draw = random.Random(agent.draw_seed("choose", prompt))
    return draw.choices(candidates, weights)[0]


def _bad(field: str, value: object, wanted: str) -> InvalidMessagesError:
    return InvalidMessagesError(
        f"{field} cannot be {shown(value)}", field=field, value=value, remedy=f"Pass {wanted}."
    )
