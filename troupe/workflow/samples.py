"""Which samples a trajectory's turns become, which share a baseline, and what a turn's reward is.

A workflow says two kinds of rewards: of a turn (`reply.reward`) and of an agent (what it returns,
with what the job's reward functions give). They mean:

*Group methods* (all but `gae`) compare one number per turn: the turn's own reward, which takes the
place of its agent's, else its agent's.

*gae* adds up what is earned along a chain, an agent's turns of one trajectory: each turn's own
reward at its last token, and its agent's reward at the chain's last token, also where that turn has
one of its own. What groups compare need not be what a turn earned: a return from the turn on is
not, since it counts later turns' rewards again. `reply.earned` says it then.

An agent that plays several sides of a game has a chain for each (`reply.chain`), or what one side
wins would be earned by the other. Each reply of `chat(n=k)` is a chain of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from troupe.workflow.agent import TurnRecord
from troupe.workflow.messages import Reply


def team_context(turn: TurnRecord, turns: Sequence[TurnRecord], limit: int) -> tuple[int, ...]:
    """The last `limit` tokens of what the other agents had seen and said when `turn` was asked for.

    Of every other agent of the trajectory, in the order of their names: the prompt of its latest
    turn that was asked for before `turn` was answered, and the response to that, if it had been
    given when `turn` was asked for. So agents that move at once see each other's prompts, and who
    moves later sees what was said before. `turns` are those of the trajectory.
    """
    latest: dict[str, TurnRecord] = {}
    for other in turns:
        name = other.role.name
        if name == turn.role.name or other.asked > turn.answered:
            continue
        if name not in latest or latest[name].asked < other.asked:
            latest[name] = other
    tokens: list[int] = []
    for _, other in sorted(latest.items()):
        tokens += other.prompt_ids
        if other.reply is not None and other.answered < turn.asked:
            tokens += other.reply.token_ids
    return tuple(tokens[-limit:])


GroupBy = Literal["agent", "turn", "branch"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One turn as a sample of its policy, before it is put into a message."""

    sample_id: str
    """`{query}_{turn}_{trajectory}`; the turn is counted over the whole trajectory, since agents
    may share a policy."""
    group_id: str
    """Samples of one query and policy with equal `group_id` share a baseline."""
    turn: TurnRecord
    reward: float | None
    """The turn's own, or else its agent's."""
    own_reward: bool = False
    """Whether it is the turn's own."""
    earned: float = 0.0
    """By this turn, in its chain."""
    final: float | None = None
    """Its agent's reward, earned once at the end of each of its chains; None: it has none."""
    chain: str = ""
    """Rows of one trajectory and agent with equal `chain` follow one another: those of turns that
    were drawn alone, on one seat. A reply of `chat(n=k)` is a chain of its own."""
    context: tuple[int, ...] | None = None
    """What the rest of the team knew (`team_context`), where that was asked for."""


def rows_of(
    turns: Sequence[TurnRecord],
    *,
    query_id: str,
    trajectory_id: str,
    trained: Collection[str],
    rewards: Mapping[str, float],
    group_by: GroupBy,
    team_tokens: int = 0,
) -> list[SampleRow]:
    """One row per turn of a policy in `trained` that has at least one token.

    `turns` are those of a closed trajectory (`Agents.close`), `rewards` those of its agents.
    `team_tokens`: so many of what the rest of the team knew go with each row; 0: none.
    """
    rows = []
    for turn in turns:
        reply = turn.reply
        if reply is None or not reply.token_ids or turn.role.policy not in trained:
            continue
        rows.append(
            SampleRow(
                sample_id=f"{query_id}_{turn.position}_{trajectory_id}",
                group_id=_group_id(turn, query_id, group_by),
                turn=turn,
                reward=reply.reward if reply.reward is not None else rewards.get(turn.role.name),
                own_reward=reply.reward is not None,
                earned=earned_by(reply),
                final=rewards.get(turn.role.name),
                chain=reply.chain if turn.siblings is None else f"{turn.place}#{turn.sibling}",
                context=team_context(turn, turns, team_tokens) if team_tokens else None,
            )
        )
    return rows


def earned_by(reply: Reply) -> float:
    """What a turn earned in its chain, without its agent's reward."""
    own = reply.reward if reply.earned is None else reply.earned
    return 0.0 if own is None else own


def metrics_of(turns: Sequence[TurnRecord]) -> dict[str, float]:
    """Sums over the turns; what a workflow logs under the same names replaces them."""
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


def _group_id(turn: TurnRecord, query_id: str, group_by: GroupBy) -> str:
    """The group's name, from what one trajectory knows: others of the query name theirs alike."""
    agent = f"{query_id}/{turn.role.name}"
    if group_by == "agent":
        return agent
    # Which call of its agent this was: the k replies of `chat(n=k)` are one turn of the tree.
    at = f"{agent}/{turn.place}"
    if group_by == "turn" or turn.siblings is None:
        return at
    # Siblings have their prompt in common, with each other and with those of the query's other
    # trajectories that came to the same point.
    return f"{at}/{turn.prompt_digest:016x}"
