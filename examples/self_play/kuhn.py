"""Kuhn poker in as few words as possible: a card and the moves so far, as in "queen pass bet".

workflow: examples.self_play.kuhn:workflow
tasks: {source: "troupe.workflow.environments:Episodes"}
"""

from __future__ import annotations

from typing import Any

from examples.games.kuhn import CARDS, MOVES
from troupe.workflow.environments import GameWorkflow, Observation, PlayRules, Properties
from troupe.workflow.environments.adapters.openspiel import OpenSpiel


def kuhn() -> OpenSpiel:
    """Create a game with the seats `p0`, which begins, and `p1`."""
    return OpenSpiel("kuhn_poker", describe=describe)


def describe(state: Any, player: int) -> str:
    """Return the player's own card and the moves so far; their number tells who made them."""
    dealt, said = state.history()[:2], state.history()[2:]
    return " ".join([CARDS[dealt[player]], *(MOVES[move] for move in said)])


def bare(properties: Properties, seat: str, seen: Observation, first: bool) -> str:
    """Return the observation without rules and legal moves, which are always the same."""
    return seen.text


# A move and an answer are one token (`sampling.max_new_tokens: 1`), so a model's policy in every
# information state can be computed exactly from its log-probs.
workflow = GameWorkflow(
    kuhn, rules=PlayRules(history="latest", illegal="random_legal", prompt=bare)
)
