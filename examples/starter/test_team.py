"""Plays the team with replies that are written here, without a model: `python -m pytest`."""

import asyncio

from examples.starter.team import solve
from troupe.workflow import ScriptedPolicy, play

QUERY = {"question": "3 or 7?", "answer": "7"}


def test_each_agent_is_rewarded_for_its_own_answer() -> None:
    replies = ScriptedPolicy({"solver": ["3"], "checker": ["7"]})
    played = asyncio.run(play(solve, QUERY, policy=replies, agents=["solver", "checker"]))
    assert played.rewards == {"solver": 0.0, "checker": 1.0, "team": 1.0}


def test_the_checker_reads_the_answer_of_the_solver() -> None:
    replies = ScriptedPolicy({"solver": ["3"], "checker": ["7"]})
    played = asyncio.run(play(solve, QUERY, policy=replies, agents=["solver", "checker"]))
    assert played.turns[1].messages == (("user", "3 or 7? 3"),)
