"""Samples of a trajectory: one per turn, with group, reward, chain and team context.

A workflow gives two kinds of rewards: for a turn (`reply.reward`) and for an agent (its returned
rewards plus the job's reward functions). Their meaning:

*Group methods* (all but `gae`) compare one number per turn: the turn's own reward if it has one,
else its agent's.

*gae* adds up rewards along a chain, an agent's turns of one trajectory: each turn's own reward at
its last token, and its agent's reward at the chain's last token, even if that turn has its own
reward. The number that groups compare may differ from the reward that the turn earned: a return
from the turn onwards includes the rewards of later turns. Then `reply.earned` gives the earned
reward.

An agent that plays several sides of a game has one chain per side (`reply.chain`); with a single
chain, one side would earn the other's rewards. Each reply of `chat(n=k)` is its own chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from troupe.workflow.turns import TurnRecord


def team_context(turn: TurnRecord, turns: Sequence[TurnRecord], limit: int) -> tuple[int, ...]:
    """Return the last `limit` tokens of the other agents' prompts and responses, as of `turn`.

    For every other agent of the trajectory, in the order of names, they contain the prompt of its
    latest turn that began before `turn` was answered, and the response if it was complete when
    `turn` began. So agents that move simultaneously see each other's prompts, and an agent that
    moves later sees earlier responses. `turns`: all turns of the trajectory.
    """
    latest: dict[str, TurnRecord] = {}
    for other in turns:
        name = other.role.name
        if name == turn.role.name or other.asked > turn.answered:
            continue
        if name not in latest or latest[name].asked < other.asked:
            latest[name] = other
    tokens: list[int] = []
    for _, other in sorted(latest.items(), reverse=True):  # of each only as much as is kept
        said = other.reply is not None and other.answered < turn.asked
        response = other.reply.response if other.reply is not None and said else ()
        own = [*other.prompt_ids[-limit:], *response[-limit:]]
        tokens = (own + tokens)[-limit:]
        if len(tokens) == limit:
            break
    return tuple(tokens)


GroupBy = Literal["agent", "turn", "branch", "query"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One turn as a sample of its policy, before it is encoded as a protobuf message."""

    sample_id: str
    """`{query}_{turn}_{trajectory}`; the turn is counted over the whole trajectory, since agents
    may share a policy."""
    group_id: str
    """Samples of one query and policy with equal `group_id` share a baseline."""
    turn: TurnRecord
    reward: float | None
    """Reward of the turn if it has one, else of its agent."""
    own_reward: bool = False
    """Whether `reward` is the turn's own."""
    earned: float = 0.0
    """Reward of this turn in its chain, without the agent's reward."""
    final: float | None = None
    """Reward of its agent, earned once at the end of each chain; None: no reward."""
    chain: str = ""
    """Name of the chain, within one trajectory and agent."""
    context: tuple[int, ...] | None = None
    """Tokens of the other agents (`team_context`); None: not requested."""


def rows_of(
    turns: Sequence[TurnRecord],
    *,
    query_id: str,
    trajectory_id: str,
    trained: Collection[str],
    rewards: Mapping[str, float],
    group_by: GroupBy,
    own_groups: bool = True,
    team_tokens: int = 0,
) -> list[SampleRow]:
    """Return one row per turn of a policy in `trained` that has at least one token.

    `turns`: of a closed trajectory (`Agents.close`); `rewards`: by agent. `own_groups`: whether
    `Reply.group` overrides `group_by`. `team_tokens`: length limit of `SampleRow.context`; 0: none.
    """
    rows = []
    for turn in turns:
        reply = turn.reply
        if reply is None or not reply.response or turn.role.policy not in trained:
            continue
        rows.append(
            SampleRow(
                sample_id=f"{query_id}_{turn.position}_{trajectory_id}",
                group_id=_group_id(turn, query_id, group_by, own_groups),
                turn=turn,
                reward=reply.reward if reply.reward is not None else rewards.get(turn.role.name),
                own_reward=reply.reward is not None,
                earned=(reply.reward if reply.earned is None else reply.earned) or 0.0,
                final=rewards.get(turn.role.name),
                chain=reply.chain if turn.siblings is None else f"{turn.place}#{turn.sibling}",
                context=team_context(turn, turns, team_tokens) if team_tokens else None,
            )
        )
    return rows


def metrics_of(turns: Sequence[TurnRecord]) -> dict[str, float]:
    """Return the metrics of a trajectory that its turns determine; values that the workflow logs
    override them."""
    done = [t.generation for t in turns if t.generation is not None]
    return {
        "turns": len(done),
        "prompt_tokens": sum(len(t.prompt_ids) for t in turns),
        "response_tokens": sum(len(g.token_ids) for g in done),
        "cached_tokens": sum(g.cached_tokens for g in done),
        "cut_by_length": sum(g.finish_reason == "length" for g in done),
        "prefix_breaks": sum(t.prefix_broken for t in turns),
        "unmet_promises": sum(bool(t.reply and t.reply.unmet) for t in turns),
    }


def _group_id(turn: TurnRecord, query_id: str, group_by: GroupBy, own_groups: bool) -> str:
    """Return the id of the turn's group, equal in all trajectories of the query that contribute to
    it."""
    # No name of an agent begins with either character.
    if own_groups and turn.reply is not None and turn.reply.group:
        return f"{query_id}/={turn.reply.group}"
    if group_by == "query":
        return f"{query_id}/*"
    agent = f"{query_id}/{turn.role.name}"
    if group_by == "agent":
        return agent
    # The k replies of `chat(n=k)` share a place.
    at = f"{agent}/{turn.place}"
    if group_by == "turn" or turn.siblings is None:
        return at
    # Siblings share their prompt, also across trajectories that reached the same point.
    return f"{at}/{turn.prompt_digest:016x}"
