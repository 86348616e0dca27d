"""The stag hunt (Rousseau 1755), several rounds: both choose at once, then see both choices.

An environment written from scratch. Two hunters catch a stag together; one alone catches a hare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from troupe.workflow.environments import (
    Action,
    Environment,
    GameWorkflow,
    IllegalMoveError,
    Observation,
    PlayRules,
    Properties,
    Reset,
    Step,
)

SEATS: Final = ("left", "right")
# Own choice and the other's -> own reward.
PAYS: Final = {
    ("stag", "stag"): 4.0,
    ("stag", "hare"): 0.0,
    ("hare", "stag"): 3.0,
    ("hare", "hare"): 2.0,
}


class StagHunt(Environment):
    """A game of `rounds` rounds for two players, with a reward in every round."""

    def __init__(self, rounds: int = 3) -> None:
        self._rounds = rounds
        self._chosen: list[Mapping[str, Action]] = []

    @property
    def properties(self) -> Properties:
        return Properties(
            name="stag_hunt",
            seats=SEATS,
            rules="Hunt with another: both say stag: 4 each. Hare: 3 or 2. Stag alone: 0.",
            simultaneous=True,
            symmetric=True,
            max_steps=self._rounds,
        )

    def reset(self, seed: int) -> Reset:
        self._chosen = []
        return Reset(SEATS, SEATS, self._observe())

    def step(self, actions: Mapping[str, Action]) -> Step:
        for seat, action in actions.items():
            if action not in ("stag", "hare"):
                raise IllegalMoveError(f"nobody hunts {action!r}", seat=seat, value=action)
        self._chosen.append(actions)
        left, right = actions["left"], actions["right"]
        rewards = {"left": PAYS[left, right], "right": PAYS[right, left]}
        over = len(self._chosen) == self._rounds
        ended, going = dict.fromkeys(SEATS, over), dict.fromkeys(SEATS, False)
        return Step(self._observe(), rewards, ended, going, () if over else SEATS)

    def _observe(self) -> dict[str, Observation]:
        seen = {}
        for seat, other in (SEATS, SEATS[::-1]):
            past = [f"You: {c[seat]}. They: {c[other]}." for c in self._chosen]
            seen[seat] = Observation(" ".join(past) or "Go.", {"stag": "stag", "hare": "hare"})
        return seen


_RULES = PlayRules(history="latest", illegal="random_legal")

workflow = GameWorkflow(StagHunt, rules=_RULES)

# The same game in child processes, as for games that compute for long or may hang.
hosted_workflow = GameWorkflow(
    "examples.games.stag_hunt:StagHunt", hosted=True, processes=2, rules=_RULES
)
