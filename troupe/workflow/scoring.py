"""Rewards of a finished trajectory: the workflow's result plus the rewards of reward functions."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from troupe.contracts import kinds, metric_names
from troupe.outcomes import (
    JSON_DEPTH,
    NotJsonError,
    described,
    json_text,
    safe_text,
    shown,
    type_name,
)
from troupe.workflow.errors import InvalidRewardError, ToolError, WorkflowError
from troupe.workflow.loading import Query
from troupe.workflow.messages import finite
from troupe.workflow.turns import TurnRecord

# Longer than any agent's name.
_NAME_CHARS = 200
# Length limit of an answer that is compared with others.
_ANSWER_CHARS = 1000


class Scorer(Protocol):
    """The caller of reward functions: the reward service, or this process
    (`troupe.workflow.trying`)."""

    async def score(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a reward function with `arguments`, and return its JSON value. Raises
        `ToolError`."""
        ...


class RewardFailedError(WorkflowError):
    """A trajectory has no usable rewards; `kind` gives the reason."""

    kind = "reward_failed"


async def rewards_of(
    given: Any,
    functions: Sequence[str],
    scorer: Scorer,
    query: Query,
    turns: Sequence[TurnRecord],
    agents: Collection[str],
) -> dict[str, float]:
    """Return the rewards per agent of a finished trajectory: those `given` by the workflow plus the
    results of the job's reward functions, whose means are recorded in `query.scores`. Raises
    `RewardFailedError`."""
    own = check_rewards(given, agents, "the workflow")
    parts = await call_functions(functions, scorer, query, turns, own, agents)
    for name, part in zip(functions, parts, strict=True):
        if part:
            query.scores[f"rewards.{name}"] = sum(part.values()) / len(part)
    return add_up([own, *parts])


def answer_of(query: Query, turns: Sequence[TurnRecord], pattern: str | None) -> str | None:
    """Return the vote of a trajectory: `query.answer`, else the match of `pattern` in its last
    reply, with white space folded. None: no vote, or only white space."""
    if query.answer is None and pattern is not None:
        replies = [turn.reply.text for turn in turns if turn.reply is not None]
        return match_of(pattern, replies[-1]) if replies else None
    return _folded(query.answer)


def match_of(pattern: str, text: object) -> str | None:
    """Return the first group (without groups: the whole) of the last match of `pattern` in a reply,
    with white space folded. None: no match, only white space, or no text."""
    if not isinstance(text, str):
        return None  # a workflow may assign anything to a reply
    *_, found = [None, *re.finditer(pattern, text)]
    return _folded(found and found[1 if found.re.groups else 0])


def _folded(answer: object) -> str | None:
    text = "" if answer is None else " ".join(str(answer).split())
    return safe_text(text, _ANSWER_CHARS) or None


def check_rewards(given: Any, agents: Collection[str], source: str) -> dict[str, float]:
    """Check the rewards per agent that a workflow or function returned, and return them; None means
    no rewards.

    Raises `RewardFailedError` of kind `reward_not_finite`, `reward_unknown_agent` or
    `reward_bad_type`.
    """
    if given is None:
        return {}
    rewards = {}
    for agent, value in _items(given, source):
        if agent not in agents and agent != metric_names.TEAM:
            named = agent.isprintable() and len(agent) <= _NAME_CHARS
            raise RewardFailedError(
                f"{source} rewards '{safe_text(agent, 60)}', which is not an agent of the job",
                # An impossible name comes from the model's text, not from the workflow's code.
                kind=kinds.REWARD_UNKNOWN_AGENT if named else "reward_bad_name",
                field=source,
                value=agent,
                remedy=f"Known: {', '.join(sorted(agents))}, and {metric_names.TEAM} for the "
                "team's success.",
            )
        try:
            rewards[agent] = finite(value, f"the reward of '{agent}' from {source}")
        except InvalidRewardError as error:
            raise RewardFailedError(
                error.message,
                kind="reward_not_finite",
                field=source,
                value=value,
                remedy=error.remedy,
            ) from error
    return rewards


def _items(given: Any, source: str) -> list[tuple[str, Any]]:
    """Return the items of a returned mapping, with keys as text."""
    kind, why = kinds.REWARD_BAD_TYPE, ""
    try:
        if isinstance(given, Mapping):
            # Not `str(key)`, which a user's class may override; other types cannot name an agent.
            return [
                (str.__str__(key) if isinstance(key, str) else f"\0{shown(key)}", value)
                for key, value in given.items()
            ]
    except BaseException as error:  # a mapping of a user-defined class
        kind, why = "reward_unreadable", f", which raised {described(error, 200)} when it was read"
    what = f"{type_name(given)} {shown(given)}{why}"
    raise RewardFailedError(
        f"{source} returned {what}, not a dict of rewards per agent",
        kind=kind,
        field=source,
        value=given,
        remedy='Return {"agent": number, ...}.',
    )


async def call_functions(
    names: Sequence[str],
    scorer: Scorer,
    query: Query,
    turns: Sequence[TurnRecord],
    rewards: Mapping[str, float],
    agents: Collection[str],
) -> list[dict[str, float]]:
    """Call the job's reward functions concurrently with `query`, `turns` and `rewards`.

    `query` is {id, split, index, data}; `turns` a list of {agent, turn, messages, response, tokens,
    finish_reason}; `rewards` the workflow's result. A function returns a dict of rewards per agent,
    or one number for every agent. Raises `RewardFailedError`, kind `reward_<why>`.
    """
    arguments = {
        "query": {
            "id": query.id,
            "split": query.split,
            "index": query.index,
            "data": dict(query.data),
        },
        "turns": [
            {
                "agent": turn.role.name,
                "turn": turn.number,
                "messages": [{"role": r, "content": c} for r, c in turn.messages],
                "response": turn.reply.text,
                "tokens": len(turn.reply.response),
                "finish_reason": turn.reply.finish_reason,
            }
            for turn in turns
            if turn.reply is not None
        ],
        "rewards": dict(rewards),
    }

    async def one(name: str) -> dict[str, float]:
        source = f"rewards.{name}"
        try:
            given = await scorer.score(name, arguments)
        except ToolError as error:
            raise RewardFailedError(
                error.message, kind=f"reward_{error.kind}", field=source, remedy=error.remedy
            ) from error
        if isinstance(given, int | float) and not isinstance(given, bool):
            given = dict.fromkeys(agents, given)
        return check_rewards(given, agents, source)

    # A task group: when one fails, the others' invocations are cancelled.
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in names]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def as_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a reward function as JSON. Raises `ToolError` of kind
    `bad_arguments`."""
    try:
        # A query may have JSON_DEPTH levels; `call_functions` adds a few.
        return json_text(arguments, allow_nan=True, depth=JSON_DEPTH + 10)
    except NotJsonError as error:
        raise ToolError(
            f"the arguments of reward functions are not JSON: {error}",
            kind=kinds.BAD_ARGUMENTS,
            field="query.data",
            remedy="Do not change the query's data.",
        ) from error


def add_up(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum per agent over all sources. Raises `RewardFailedError` of kind `reward_not_finite`."""
    total: dict[str, float] = {}
    for part in parts:
        for agent, value in part.items():
            total[agent] = total.get(agent, 0.0) + value
            if not math.isfinite(total[agent]):
                raise RewardFailedError(
                    f"the rewards of '{agent}' add up to more than a float can be",
                    kind="reward_not_finite",
                    field=f"agents.{agent}",
                    value=value,
                    remedy="Return rewards of an ordinary size, for example between -1 and 1.",
                )
    return total


def check_complete(
    rewards: Mapping[str, float], turns: Sequence[TurnRecord], trained: Collection[str]
) -> None:
    """Raise `RewardFailedError` of kind `reward_missing` if a turn of a trained policy has no
    reward and its agent has none either."""
    for turn in turns:
        agent = turn.role.name
        if turn.role.policy not in trained or agent in rewards:
            continue
        if turn.reply is not None and turn.reply.reward is None:
            raise RewardFailedError(
                f"'{agent}' took turns, but has no reward",
                kind=kinds.REWARD_MISSING,
                field=f"agents.{agent}",
                remedy="Return its reward from the workflow, set `reply.reward` on every turn, or "
                "give the job a function under `rewards`.",
            )


def with_turn_rewards(
    rewards: Mapping[str, float], turns: Sequence[TurnRecord]
) -> dict[str, float]:
    """Return the rewards to report: an agent with only turn-level rewards gets their mean."""
    means = dict(rewards)
    own: dict[str, list[float]] = {}
    for turn in turns:
        if turn.reply is not None and turn.reply.reward is not None:
            own.setdefault(turn.role.name, []).append(turn.reply.reward)
    for agent, values in own.items():
        # Divided first: the sum may overflow.
        means.setdefault(agent, math.fsum(value / len(values) for value in values))
    return means
