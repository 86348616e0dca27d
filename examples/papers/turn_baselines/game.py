"""The go/stop game: an agent that may go on for a bonus, and the three advantages of its turns.

An episode has at most three turns. At the first two the agent says "go" or "stop". Going earns a
bonus of 1 with probability 1/2 and leads to the next turn. The episode ends when the agent stops,
or with any answer at the third turn; then it earns 1 with a probability that falls from turn to
turn. Another word than the two counts as one of them, by a fair coin.

Going is right everywhere: the bonuses exceed what the outcome loses. Advantages that centre bonuses
per turn index and then add them up do not see the bonuses, only the loss.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from troupe.algorithms.advantages import leave_one_out_advantages

TURNS: Final = 3
BONUS: Final = 0.5
"""Expected bonus of going."""
OUTCOMES: Final = (0.9, 0.7, 0.5)
"""Expected outcome of an episode that ends at each turn."""


@dataclass
class Episode:
    """A played episode: whether the agent went on at each turn but the last, and what it earned."""

    went: list[bool]
    """One entry per turn; the last is False."""
    bonuses: list[float]
    """One for each turn but the last."""
    outcome: float

    @property
    def turns(self) -> int:
        """The number of turns."""
        return len(self.went)

    @property
    def returns_to_go(self) -> list[float]:
        """The sum of rewards from each turn on."""
        return [sum(self.bonuses[turn:]) + self.outcome for turn in range(self.turns)]


def bonus(draw: random.Random) -> float:
    """Draw the bonus of going."""
    return float(draw.random() < BONUS)


def outcome(turn: int, draw: random.Random) -> float:
    """Draw the outcome of an episode that ends at `turn`, counted from 0."""
    return float(draw.random() < OUTCOMES[turn])


def play(go: Sequence[float], draw: random.Random) -> Episode:
    """Play one episode with the probabilities of going at the first turns."""
    went: list[bool] = []
    bonuses: list[float] = []
    while len(went) < TURNS - 1 and draw.random() < go[len(went)]:
        went.append(True)
        bonuses.append(bonus(draw))
    went.append(False)
    return Episode(went, bonuses, outcome(len(went) - 1, draw))


def values(go: Sequence[float]) -> list[float]:
    """Return the exact expected return from each turn on."""
    found = [OUTCOMES[-1]]
    for turn in reversed(range(TURNS - 1)):
        found.insert(0, (1 - go[turn]) * OUTCOMES[turn] + go[turn] * (BONUS + found[0]))
    return found


def intermediate(go: Sequence[float]) -> float:
    """Return E[R_intermediate]: the expected bonuses of an episode that goes at its first turn."""
    found = 0.0
    for chance in reversed(go[1:]):
        found = chance * (BONUS + found)
    return BONUS + found


def to_go(group: Sequence[Episode]) -> list[list[float]]:
    """Return advantages per episode and turn: the return from the turn on, against the mean of the
    others at the same turn (`group_by: turn`)."""
    return _at_each_turn(group, [episode.returns_to_go for episode in group])


def whole(group: Sequence[Episode]) -> list[list[float]]:
    """The same with the whole return of the episode at every turn."""
    return _at_each_turn(group, [[one.returns_to_go[0]] * one.turns for one in group])


def per_index(group: Sequence[Episode]) -> list[list[float]]:
    """Bonuses centred per turn index and outcomes over all episodes, then added up from each turn
    on (as MT-GRPO, Wei et al. 2025, section 4, for any number of turns)."""
    bonuses = _at_each_turn(group, [one.bonuses for one in group])
    outcomes = [one.outcome for one in group]
    ends = leave_one_out_advantages(outcomes, [outcomes] * len(group)).tolist()
    return [
        [sum(centred[turn:]) + end for turn in range(episode.turns)]
        for episode, centred, end in zip(group, bonuses, ends, strict=True)
    ]


def _at_each_turn(group: Sequence[Episode], values: list[list[float]]) -> list[list[float]]:
    """Centre `values`, by episode and turn, on the mean of the others that have the turn."""
    found: list[list[float]] = [[] for _ in group]
    for turn in range(TURNS):
        there = [one for one, value in enumerate(values) if len(value) > turn]
        rewards = [values[one][turn] for one in there]
        centred = leave_one_out_advantages(rewards, [rewards] * len(there))
        for one, advantage in zip(there, centred.tolist(), strict=True):
            found[one].append(advantage)
    return found


ADVANTAGES: Final = {"to_go": to_go, "whole": whole, "per_index": per_index}
