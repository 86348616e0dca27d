"""Rewards of a finished trajectory: what the workflow returned plus what functions add."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from troupe.outcomes import (
    JSON_DEPTH,
    NotJsonError,
    described,
    json_text,
    safe_text,
    shown,
    type_name,
)
from troupe.workflow.agent import TurnRecord
from troupe.workflow.errors import InvalidRewardError, ToolError, WorkflowError
from troupe.workflow.loading import Query
from troupe.workflow.messages import finite

# Belongs to no agent: the team's success, reported beside the agents' rewards.
TEAM = "team"
# Longer than any agent's name.
_NAME_CHARS = 200


class Scorer(Protocol):
    """Calls the job's reward functions."""

    async def score(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The JSON value of a reward function called with `arguments`. Raises `ToolError`."""
        ...


class RewardFailedError(WorkflowError):
    """A trajectory has no usable rewards; `kind` says why."""

    kind = "reward_failed"


def check_rewards(given: Any, agents: Collection[str], source: str) -> dict[str, float]:
    """Rewards per agent as a workflow or function returned them; None means none.

    Raises `RewardFailedError` of kind `reward_not_finite`, `reward_unknown_agent` or
    `reward_bad_type`.
    """
    if given is None:
        return {}
    rewards = {}
    for agent, value in _items(given, source):
        if agent not in agents and agent != TEAM:
            named = agent.isprintable() and len(agent) <= _NAME_CHARS
            raise RewardFailedError(
                f"{source} rewards '{safe_text(agent, 60)}', which is no agent of the job",
                # What can be no agent's name comes from what was played, not from the code.
                kind="reward_unknown_agent" if named else "reward_bad_name",
                field=source,
                value=agent,
                remedy=f"Known: {', '.join(sorted(agents))}, and {TEAM} for the team's success.",
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
    """What a returned mapping holds, its keys as texts."""
    kind, why = "reward_bad_type", ""
    try:
        if isinstance(given, Mapping):
            return [(_as_name(key), value) for key, value in given.items()]
    except BaseException as error:  # of a mapping that is the user's own
        kind, why = "reward_unreadable", f", which raised {described(error, 200)} when it was read"
    what = f"{type_name(given)} {shown(given)}{why}"
    raise RewardFailedError(
        f"{source} returned {what}, not a dict of rewards per agent",
        kind=kind,
        field=source,
        value=given,
        remedy='Return {"agent": number, ...}.',
    )


def _as_name(key: object) -> str:
    # A text's own characters, whatever its class makes of them; others can name no agent.
    return str.__str__(key) if isinstance(key, str) else f"\0{shown(key)}"


async def call_functions(
    names: Sequence[str],
    scorer: Scorer,
    query: Query,
    turns: Sequence[TurnRecord],
    rewards: Mapping[str, float],
    agents: Collection[str],
) -> list[dict[str, float]]:
    """What the job's reward functions give, called at once with `query`, `turns`, `rewards`.

    `query` is {id, split, index, data}; `turns` a list of {agent, turn, messages, response,
    finish_reason}; `rewards` what the workflow returned. A function returns a dict of rewards per
    agent, or one number for every agent. Raises `RewardFailedError`, kind `reward_<why>`.
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
                error.message,
                kind=f"reward_{error.kind}",
                field=source,
                remedy=error.remedy,
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
    """The arguments of a reward function as JSON. Raises `ToolError` of kind `bad_arguments`."""
    try:
        # What a query may hold, inside of what `call_functions` makes of it.
        return json_text(arguments, allow_nan=True, depth=JSON_DEPTH + 10)
    except NotJsonError as error:
        raise ToolError(
            f"what reward functions are called with is not JSON: {error}",
            kind="bad_arguments",
            field="query.data",
            remedy="Leave the query's data as the tasks gave it.",
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
                    remedy="Return rewards of an ordinary size, as between -1 and 1.",
                )
    return total


def check_complete(
    rewards: Mapping[str, float], turns: Sequence[TurnRecord], trained: Collection[str]
) -> None:
    """Every turn to be trained on must have a reward: its own or its agent's.

    Raises `RewardFailedError` of kind `reward_missing`.
    """
    for turn in turns:
        agent = turn.role.name
        if turn.role.policy not in trained or agent in rewards:
            continue
        if turn.reply is not None and turn.reply.reward is None:
            raise RewardFailedError(
                f"'{agent}' took turns, but nobody rewarded it",
                kind="reward_missing",
                field=f"agents.{agent}",
                remedy="Return its reward from the workflow, set `reply.reward` on every turn, or "
                "give the job a function under `rewards`.",
            )


def with_turn_rewards(
    rewards: Mapping[str, float], turns: Sequence[TurnRecord]
) -> dict[str, float]:
    """Rewards to report: an agent that only has turn-level rewards shows their mean."""
    means = dict(rewards)
    own: dict[str, list[float]] = {}
    for turn in turns:
        if turn.reply is not None and turn.reply.reward is not None:
            own.setdefault(turn.role.name, []).append(turn.reply.reward)
    for agent, values in own.items():
        # Divided first: their sum may be beyond a float.
        means.setdefault(agent, math.fsum(value / len(values) for value in values))
    return means
