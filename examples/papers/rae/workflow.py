"""Kuhn poker against itself, with the return of a seat as the reward of all its turns.

workflow: examples.papers.rae.workflow:workflow
tasks: {source: "examples.papers.rae.workflow:Deals"}
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from examples.self_play.kuhn import bare, kuhn
from troupe.workflow import Agents, Query, Tools
from troupe.workflow.environments import GameWorkflow, PlayRules
from troupe.workflow.environments.adapters.openspiel import OpenSpiel

SEATS: Final = {"first": "p0", "second": "p1"}
"""Seat by agent, where each seat has an agent of its own."""

DEALS: Final = tuple(itertools.permutations(range(3), 2))
"""The cards of the two seats."""

# A move and an answer are one token (`sampling.max_new_tokens: 1`), so the policy can be computed
# exactly in every information state. An answer that is no move is a fair coin.
GAME: Final = GameWorkflow(
    kuhn,
    # Seats do not change: an agent's baseline is its seat's.
    permute=False,
    rules=PlayRules(history="latest", illegal="random_legal", prompt=bare),
)


class Deals:
    """Tasks: query i is a game with a seed of its own and deal i % 6, so that a step has all deals
    equally often. Which cards are dealt is most of what varies in the returns of a seat."""

    def __init__(self, split: str, size: int = 1_000_000) -> None:
        self._first = 0 if split == "train" else 2**40
        self._size = size
        self._dealt: tuple[int, ...] = ()
        self._game = OpenSpiel("kuhn_poker", describe=self._note)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        wanted = DEALS[index % len(DEALS)]
        for seed in itertools.count(self._first + (index << 8)):
            self._game.reset(seed)
            if self._dealt == wanted:
                return {"seed": seed}
        raise AssertionError("a deal comes after a few seeds")

    def _note(self, state: Any, player: int) -> str:
        self._dealt = tuple(state.history()[:2])
        return ""


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Play one deal. A job's only agent plays both seats."""
    await GAME(query, agents, tools)
    for turn in agents.turns:
        assert turn.reply is not None, "`turns` have replies"
        seat = turn.reply.chain or SEATS[turn.role.name]
        # Also for an answer that is no move, which `GameWorkflow` rewards apart: the baseline is to
        # be the game's.
        turn.reply.reward = query.metrics[f"return_{seat}"]
    return {}
