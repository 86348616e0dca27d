"""Games that tests name as workflows (`tests.support.tables_of_three:...`): more than two players,
and players who are not in the same situation. Told in the words of `examples.games`."""

from __future__ import annotations

from typing import Any, Final

from examples.games import kuhn
from troupe.workflow.environments import GameWorkflow, PlayRules
from troupe.workflow.environments.adapters.openspiel import OpenSpiel

# Three players need a fourth card.
CARDS: Final = (*kuhn.CARDS, "stag")
_RULES: Final = PlayRules(history="latest", illegal="random_legal")


def kuhn_of_three() -> OpenSpiel:
    """Kuhn poker for three (Szafron et al. 2013)."""
    return OpenSpiel("kuhn_poker(players=3)", describe=describe, rules=kuhn.RULES)


def describe(state: Any, player: int) -> str:
    """A player's knowledge: its own card, and the moves in order."""
    dealt, said = state.history()[:3], state.history()[3:]
    return " ".join(
        [f"You hold the {CARDS[dealt[player]]}.", *(f"{kuhn.MOVES[move]}." for move in said)]
    )


three = GameWorkflow(kuhn_of_three, rules=_RULES)
# The first agent always begins.
sides = GameWorkflow(kuhn.kuhn, permute=False, rules=_RULES)
