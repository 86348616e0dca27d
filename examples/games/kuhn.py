"""Kuhn poker (Kuhn 1950) from OpenSpiel, described in words: two seats, three cards, one bet.

workflow: examples.games.kuhn:workflow
tasks: {source: "troupe.workflow.environments:Episodes"}
"""

from __future__ import annotations

from typing import Any, Final

from troupe.workflow.environments import GameWorkflow, PlayRules
from troupe.workflow.environments.adapters.openspiel import OpenSpiel

CARDS: Final = ("jack", "queen", "king")
MOVES: Final = ("pass", "bet")
RULES: Final = (
    "Kuhn poker. Cards: jack, queen, king. Both pay 1. You pass or bet 1 more; "
    "who passes after a bet loses. Else the higher card wins."
)


def kuhn() -> OpenSpiel:
    """Create a game with the seats `p0`, which begins, and `p1`."""
    return OpenSpiel("kuhn_poker", describe=describe, rules=RULES)


def describe(state: Any, player: int) -> str:
    """Describe a player's own card and the moves so far. The history begins with the deal."""
    dealt, said = state.history()[:2], state.history()[2:]
    lines = [f"You hold the {CARDS[dealt[player]]}."]
    for number, move in enumerate(said):
        who = "You" if number % 2 == player else "They"
        lines.append(f"{who}: {MOVES[move]}.")
    return " ".join(lines)


# A player needs only the newest observation, which describes the whole hand. An illegal answer is
# itself punished, and a random legal move replaces it, so that the hand continues.
workflow = GameWorkflow(kuhn, rules=PlayRules(history="latest", illegal="random_legal"))
