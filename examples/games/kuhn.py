"""Kuhn poker (Kuhn 1950) from OpenSpiel, told in words: two seats, three cards, one bet.

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
    """A new game; its seats are `p0`, who begins, and `p1`."""
    return OpenSpiel("kuhn_poker", describe=describe, rules=RULES)


def describe(state: Any, player: int) -> str:
    """What a player may know: its own card, and what was said. The deal heads the history."""
    dealt, said = state.history()[:2], state.history()[2:]
    lines = [f"You hold the {CARDS[dealt[player]]}."]
    for number, move in enumerate(said):
        who = "You" if number % 2 == player else "They"
        lines.append(f"{who}: {MOVES[move]}.")
    return " ".join(lines)


# A player needs no more than the newest observation, which tells the whole hand. An answer that is
# no move is punished by itself, and a legal one drawn for it: the hand goes on.
workflow = GameWorkflow(kuhn, rules=PlayRules(history="latest", illegal="random_legal"))
