"""The team's knowledge when a turn was requested, and the turns of one chain."""

from __future__ import annotations

from typing import Any

from troupe.workflow.backend import Sampling
from troupe.workflow.messages import Reply
from troupe.workflow.samples import rows_of, team_context
from troupe.workflow.turns import AgentCall, Role, TurnRecord, settle

NOBODY: Any = None


def _turn(
    agent: str,
    asked: int,
    answered: int,
    prompt: tuple[int, ...],
    said: tuple[int, ...],
    **own: Any,
) -> TurnRecord:
    reward, sibling, n = own.get("reward"), own.get("sibling", 0), own.get("n")
    reply = Reply(agent, 0, "", prompt, said, (0.0,) * len(said), "stop", "", ())
    if reward is not None:
        reply.reward = reward
    turn = TurnRecord(
        Role(agent, agent, NOBODY, Sampling()),
        0,
        0,
        (),
        Sampling(),
        AgentCall((), (own.get("step", asked),), n),
        prompt,
        sibling,
        asked=asked,
        answered=answered,
    )
    turn.reply = reply
    return turn


def test_simultaneous_agents_see_prompts_and_later_agents_see_replies() -> None:
    one = _turn("row", 1, 3, (1, 2), (3,))
    two = _turn("column", 2, 4, (4,), (5, 6))
    late = _turn("judge", 5, 6, (7,), (8,))
    turns = [one, two, late]
    # Without messages that followed its own response or were answered meanwhile.
    assert team_context(one, turns, 9) == (4,)
    assert team_context(two, turns, 9) == (1, 2)
    assert team_context(late, turns, 9) == (4, 5, 6, 1, 2, 3)  # in the order of names
    assert team_context(late, turns, 2) == (2, 3)
    assert team_context(one, [one], 9) == ()
    for limit in range(1, 8):  # the end of the whole, however little of it is read
        assert team_context(late, turns, limit) == (4, 5, 6, 1, 2, 3)[-limit:]


def test_the_latest_turn_of_each_agent_counts() -> None:
    turns = [
        _turn("row", 1, 2, (1,), (2,)),
        _turn("column", 3, 4, (3,), (4,)),
        _turn("row", 5, 6, (1, 2, 5), (6,)),
        _turn("column", 7, 8, (9,), (9,)),
    ]
    assert team_context(turns[1], turns, 9) == (1, 2)
    assert team_context(turns[2], turns, 9) == (3, 4)
    assert team_context(turns[3], turns, 9) == (1, 2, 5, 6)


def test_rows_have_the_team_context_that_a_critic_reads() -> None:
    turns = settle(
        [
            _turn("row", 1, 2, (1,), (2,)),
            _turn("column", 3, 4, (3,), (4,)),
            _turn("row", 5, 7, (5,), (6,), n=2, step=5, reward=1.0),
            _turn("row", 6, 8, (5,), (7,), n=2, step=5, sibling=1),
        ]
    )
    how: dict[str, Any] = {"query_id": "q", "trajectory_id": "t", "trained": {"row", "column"}}
    rows = rows_of(
        turns, **how, rewards={"row": 2.0, "column": 3.0}, group_by="agent", team_tokens=8
    )
    assert [row.chain for row in rows] == ["", "", "1#0", "1#1"]
    assert [row.own_reward for row in rows] == [False, False, True, False]
    assert [row.reward for row in rows] == [2.0, 3.0, 1.0, 2.0]
    assert [row.context for row in rows] == [(), (1, 2), (3, 4), (3, 4)]
    plain = rows_of(turns, **how, rewards={"row": 2.0, "column": 3.0}, group_by="agent")
    assert all(row.context is None for row in plain)
