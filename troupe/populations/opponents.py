"""Opponent sampling: prioritized fictitious self-play, past versions, AlphaStar's league."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from troupe.populations.games import Array

Weighting = Literal["hard", "variance", "linear"]
Role = Literal["main", "main_exploiter", "league_exploiter"]

# Assumed win rate of pairs without matches.
_EVEN: Final = 0.5
# Below this win rate a main agent counts as having forgotten how to beat the opponent.
_LOST: Final = 0.3
_WEIGHTINGS: Final = {
    "hard": lambda wins: (1.0 - wins) ** 2,
    "variance": lambda wins: wins * (1.0 - wins),
    "linear": lambda wins: 1.0 - wins,
}


def pfsp(win_rates: object, *, weighting: Weighting = "hard") -> Array:
    """Return PFSP probabilities [k] of opponents, given the learner's win rates [k] against them.

    Proportional to f(x) = (1 - x)^2 ("hard": opponents that it loses to), x (1 - x) ("variance":
    its equals) or 1 - x ("linear") (Vinyals et al. 2019, methods, "PFSP"); uniform if all are 0.

    Raises ValueError for rates outside [0, 1] or an unknown weighting.
    """
    wins = np.asarray(win_rates, dtype=np.float64)
    if wins.ndim != 1 or not len(wins) or not ((wins >= 0) & (wins <= 1)).all():
        raise ValueError(f"win rates must be between 0 and 1, one per opponent, not {win_rates}")
    if weighting not in _WEIGHTINGS:
        raise ValueError(f"there is no weighting {weighting!r}; use one of {list(_WEIGHTINGS)}")
    weights: Array = _WEIGHTINGS[weighting](wins)
    total = float(weights.sum())
    if total <= 0.0:
        return np.full(len(wins), 1.0 / len(wins))
    return weights / total


def past_selves(versions: int, *, delta: float = 0.0) -> Array:
    """Return probabilities [versions] of earlier versions as opponents, the newest last.

    Uniform over the newest part `delta` of them (Bansal et al. 2018, section 4.2): 0 is the newest
    version alone (naive self-play), 1 all versions (fictitious self-play). Raises ValueError.
    """
    if versions < 1 or not 0.0 <= delta <= 1.0:
        raise ValueError(
            f"delta must be in [0, 1] and versions at least 1, not {delta} and {versions}"
        )
    oldest = min(versions - 1, math.floor((1.0 - delta) * versions))
    found = np.zeros(versions)
    found[oldest:] = 1.0 / (versions - oldest)
    return found


@dataclass(frozen=True, slots=True)
class LeagueMember:
    """One policy of a league: a learner, or a frozen version of one."""

    name: str
    role: Role
    frozen: bool = True
    parent: str = ""
    """The learner whose version it is; empty for a learner."""


@dataclass(frozen=True, slots=True)
class LeagueRules:
    """AlphaStar's league (Vinyals et al. 2019, extended data table 5 and methods)."""

    self_play: float = 0.35
    """Share of a main agent's games against main agents."""
    forgotten: float = 0.15
    """Share of its games against frozen versions to which it has begun to lose."""
    weighting: Weighting = "hard"
    exploiter_hopeless: float = 0.2
    """Below this win rate against the main agents a main exploiter also plays their past."""
    freeze_at: float = 0.7
    """Win rate against every opponent at which a learner is frozen."""
    freeze_after: int = 2_000_000_000
    """Environment steps after which a learner is frozen in any case."""


def league_opponents(
    learner: LeagueMember,
    members: Sequence[LeagueMember],
    wins: Mapping[tuple[str, str], float],
    rules: LeagueRules | None = None,
) -> dict[str, float]:
    """Return, by name, the probability that each member is the next opponent of `learner`.

    `wins[a, b]`: a's win rate against b, in [0, 1]; pairs without matches count as even. Raises
    ValueError if there is no opponent.
    """
    rules = rules or LeagueRules()
    mains = [one.name for one in members if one.role == "main" and not one.frozen]
    frozen = [one for one in members if one.frozen]

    def rate(other: str) -> float:
        return wins.get((learner.name, other), _EVEN)

    def prioritised(names: Sequence[str], weighting: Weighting) -> dict[str, float]:
        shares = pfsp([rate(name) for name in names], weighting=weighting)
        return dict(zip(names, shares.tolist(), strict=True))

    everybody = [one.name for one in frozen]
    if learner.role == "league_exploiter":
        return _mixed([(1.0, prioritised(everybody, rules.weighting) if everybody else {})])
    if learner.role == "main_exploiter":
        even = {name: 1.0 / len(mains) for name in mains}
        past = [one.name for one in frozen if one.parent in mains]
        if past and all(rate(name) < rules.exploiter_hopeless for name in mains):
            return _mixed([(0.5, even), (0.5, prioritised(past, "variance"))])
        return _mixed([(1.0, even)])
    # A main agent plays frozen members, main agents, and members that it has forgotten how to beat.
    lost = [
        one.name
        for one in frozen
        if (one.parent == learner.name or one.role == "main_exploiter") and rate(one.name) < _LOST
    ]
    parts = [(rules.self_play, {name: 1.0 / len(mains) for name in mains})]
    if everybody:
        rest = 1.0 - rules.self_play - rules.forgotten
        parts.append((rest, prioritised(everybody, rules.weighting)))
    if lost:
        parts.append((rules.forgotten, prioritised(lost, "variance")))
    return _mixed(parts)


def is_due(
    learner: LeagueMember,
    members: Sequence[LeagueMember],
    wins: Mapping[tuple[str, str], float],
    steps: int,
    rules: LeagueRules | None = None,
) -> bool:
    """Return whether to freeze `learner` now, `steps` environment steps after it was last
    frozen."""
    rules = rules or LeagueRules()
    if steps >= rules.freeze_after:
        return True
    if learner.role == "main_exploiter":
        rivals = [one.name for one in members if one.role == "main" and not one.frozen]
    else:
        rivals = [one.name for one in members if one.frozen]
    rates = [wins.get((learner.name, rival)) for rival in rivals]
    return bool(rates) and all(one is not None and one >= rules.freeze_at for one in rates)


def _mixed(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of distributions; empty ones are left out."""
    there = [(weight, shares) for weight, shares in parts if shares and weight > 0]
    total = sum(weight for weight, _ in there)
    if not total:
        raise ValueError("there is no opponent; add a member to the league first")
    found: dict[str, float] = {}
    for weight, shares in there:
        for name, share in shares.items():
            found[name] = found.get(name, 0.0) + weight / total * share
    return found
