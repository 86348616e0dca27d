"""The go/stop game played by a language model, and the tasks of the recipe's arms.

workflow: examples.papers.turn_baselines.workflow:workflow
tasks: {source: "examples.papers.turn_baselines.workflow:Games", args: {arm: to_go}}
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import torch

from examples.papers.turn_baselines.game import TURNS, Episode, bonus, outcome, per_index
from troupe.algorithms.advantages import SampleBatch
from troupe.workflow import Agents, Query, Reply, Tools

WORDS: Final = ("go", "stop")
PROMPTS: Final = ("first", "second", "third")
# The coins of the game. All trajectories of a query need their own, so they have no seed.
_DRAW: Final = random.Random()


class Games:
    """Tasks: query i is a game of the `arm`; a query of `episodes` plays as many at once."""

    def __init__(self, split: str, arm: str, episodes: int = 1, size: int = 1_000_000) -> None:
        self._task = {"arm": arm, "episodes": episodes}
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._task)


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Play the query's episodes, and reward every turn as the arm says.

    `to_go` and `whole` give turns their returns, which the job's advantage centres. `per_index`
    gives them their advantages (`given`): no reward of a single trajectory can express it, so one
    trajectory plays the whole group.
    """
    played = await asyncio.gather(*(_play(agents) for _ in range(query["episodes"])))
    episodes = [episode for episode, _ in played]
    found = {
        "to_go": lambda: [one.returns_to_go for one in episodes],
        "whole": lambda: [[one.returns_to_go[0]] * one.turns for one in episodes],
        "per_index": lambda: per_index(episodes),
    }[query["arm"]]()
    for (_, replies), rewards in zip(played, found, strict=True):
        for reply, reward in zip(replies, rewards, strict=True):
            reply.reward = reward
    count = len(episodes)
    query.log(
        went=sum(one.went[0] for one in episodes) / count,
        episode_return=sum(one.returns_to_go[0] for one in episodes) / count,
    )
    return {}


async def _play(agents: Agents) -> tuple[Episode, list[Reply]]:
    went: list[bool] = []
    bonuses: list[float] = []
    replies: list[Reply] = []
    while True:
        turn = len(replies)
        reply = await agents["player"].chat([{"role": "user", "content": PROMPTS[turn]}])
        replies.append(reply)
        word = reply.text.strip()
        word = word if word in WORDS else _DRAW.choice(WORDS)
        went.append(word == "go" and turn < TURNS - 1)
        if not went[-1]:
            return Episode(went, bonuses, outcome(turn, _DRAW)), replies
        bonuses.append(bonus(_DRAW))


def given(samples: SampleBatch) -> torch.Tensor:
    """The advantage of the arm `per_index`: what the workflow computed over the whole group."""
    return samples.rewards
