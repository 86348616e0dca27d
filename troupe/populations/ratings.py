"""Ratings of members: one number each, for people; meta-solvers use payoffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

# Of somebody who never played (Weng and Lin 2011, as openskill has it).
MEAN = 25.0
DEVIATION = 25.0 / 3.0


@dataclass(frozen=True, slots=True)
class Rating:
    """Skill as a normal distribution; `mean - 3 * deviation` is a cautious guess of it."""

    mean: float = MEAN
    deviation: float = DEVIATION
    matches: int = 0


def rated(
    ratings: Mapping[str, Rating], members: Sequence[str], payoffs: Sequence[float]
) -> dict[str, Rating]:
    """The new ratings of those who played one match; who has more is ahead of who has less.

    By the Plackett-Luce model (Weng and Lin 2011, algorithm 4) of `openskill`, for two players or
    more. Members not in `ratings` never played. Somebody on several seats is one player, who got
    the mean of them; a match of nobody else changes nobody. A function of its arguments alone, so
    ratings of the same matches in the same order are the same to the bit.

    Raises ValueError where the lengths differ.
    """
    if len(members) != len(payoffs):
        raise ValueError(f"{len(members)} members and {len(payoffs)} payoffs")
    got: dict[str, list[float]] = {}
    for name, payoff in zip(members, payoffs, strict=True):
        got.setdefault(name, []).append(payoff)
    if len(got) < 2:
        return {}
    model = _model()
    before = [ratings.get(name, Rating()) for name in got]
    teams = [[model.rating(mu=one.mean, sigma=one.deviation)] for one in before]
    after = model.rate(teams, scores=[fmean(own) for own in got.values()])
    return {
        name: Rating(float(team[0].mu), float(team[0].sigma), old.matches + 1)
        for name, old, team in zip(got, before, after, strict=True)
    }


@cache
def _model() -> Any:
    from openskill.models import PlackettLuce  # only jobs with a population need it

    return PlackettLuce(mu=MEAN, sigma=DEVIATION)
