"""Kuhn poker in as few words as there are: a card and what was said, as in "queen pass bet".

workflow: examples.self_play.kuhn:workflow
tasks: {source: "troupe.workflow.environments:Episodes"}
"""

from __future__ import annotations

from typing import Any

from examples.games.kuhn import CARDS, MOVES
from troupe.workflow.environments import GameWorkflow, Observation, PlayRules, Properties
from troupe.workflow.environments.adapters.openspiel import OpenSpiel


def kuhn() -> OpenSpiel:
    """A new game; its seats are `p0`, who begins, and `p1`."""
    return OpenSpiel("kuhn_poker", describe=describe)


def describe(state: Any, player: int) -> str:
    """The own card and the moves so far: who made them is told by their number."""
    dealt, said = state.history()[:2], state.history()[2:]
    return " ".join([CARDS[dealt[player]], *(MOVES[move] for move in said)])


def bare(properties: Properties, seat: str, seen: Observation, first: bool) -> str:
    """What is seen, and no word of rules or legal moves, which are always the same."""
    return seen.text


# A move is one token and an answer too (`sampling.max_new_tokens: 1`): what a model does in every
# information state can then be computed exactly from its log-probs.
workflow = GameWorkflow(
    kuhn, rules=PlayRules(history="latest", illegal="random_legal", prompt=bare)
)
