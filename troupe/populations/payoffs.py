"""Empirical payoff table of a population with confidence intervals, and members' skill ratings; the
matches that the table needs next, and the seating of members in a match."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from scipy.special import stdtrit

from troupe.populations.games import Array

# One choice of members (a joint profile): by role, the index of a member in its pool.
Members = tuple[int, ...]
# The rating of a member that never played: openskill's defaults (Weng and Lin 2011).
MEAN = 25.0
DEVIATION = 25.0 / 3.0


@dataclass(frozen=True, slots=True)
class Rating:
    """Skill as a normal distribution; `mean - 3 * deviation` is a conservative estimate."""

    mean: float = MEAN
    deviation: float = DEVIATION
    matches: int = 0


def rated(
    ratings: Mapping[str, Rating], members: Sequence[str], payoffs: Sequence[float]
) -> dict[str, Rating]:
    """Return the updated ratings of a match's members, ranked by payoff.

    Uses the Plackett-Luce model (Weng and Lin 2011, algorithm 4) of `openskill`, for two members or
    more; a match of a member against itself changes nothing. A member in several seats counts as
    one, with the mean payoff. Members not in `ratings` get the initial rating. Bitwise
    deterministic. Raises ValueError if the lengths differ.
    """
    if len(members) != len(payoffs):
        raise ValueError(f"{len(members)} members have {len(payoffs)} payoffs")
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


@dataclass
class PayoffEntry:
    """A cell of the payoff table: the mean payoffs of one choice of members, with variance."""

    mean: Array
    """Per player [n]."""
    squares: Array
    """Sums of squared deviations from the mean, per player [n] (Welford 1962)."""
    matches: int = 0
    exact: bool = False
    """Whether the mean was computed, not sampled."""

    def add(self, payoffs: Array) -> None:
        """Count one match with these payoffs [n]."""
        self.matches += 1
        change = payoffs - self.mean
        self.mean = self.mean + change / self.matches
        self.squares = self.squares + change * (payoffs - self.mean)

    def add_all(self, payoffs: Array) -> None:
        """Count many matches [m, n] at once (Chan et al. 1979, section 2)."""
        new = len(payoffs)
        if not new:
            return
        mean = payoffs.mean(axis=0)
        change, whole = mean - self.mean, self.matches + new
        apart = change**2 * self.matches * new / whole
        self.squares = self.squares + ((payoffs - mean) ** 2).sum(axis=0) + apart
        self.mean = self.mean + change * new / whole
        self.matches = whole

    @property
    def variance(self) -> Array:
        """The variance of one match, per player [n]; infinite before the second."""
        if self.exact:
            return np.zeros_like(self.mean)
        if self.matches < 2:
            return np.full_like(self.mean, math.inf)
        return self.squares / (self.matches - 1)

    def half_width(self, pooled: Array | None = None) -> float:
        """Half the width of Student's 95 % confidence interval of the least certain player's mean.

        `pooled` [n]: `PayoffTable.pooled`, the variance within cells. It bounds the cell's sum of
        squares from below, so that a few equal results do not count as certain in a table whose
        other cells vary.
        """
        if self.exact:
            return 0.0
        if self.matches < 2:
            return math.inf
        variance = self.variance
        if pooled is not None:
            variance = np.maximum(variance, pooled / self.matches)
        deviations = float(stdtrit(self.matches - 1, (1 + 0.95) / 2))
        return deviations * math.sqrt(float(variance.max()) / self.matches)


@dataclass
class PayoffTable:
    """Empirical payoffs of growing pools; cells that were never played are missing.

    In a `symmetric` table all roles draw from one pool, and a payoff does not depend on the order
    of the other members: permutations are one cell, and copies of a member each get their mean.
    """

    sizes: list[int]
    """Members of each role's pool; all equal if the table is symmetric."""
    symmetric: bool = False
    cells: dict[Members, PayoffEntry] = field(default_factory=dict)

    @property
    def players(self) -> int:
        """The number of roles, each played by a member of its pool."""
        return len(self.sizes)

    @property
    def pooled(self) -> Array:
        """The pooled variance of a match within its cell, per player [n]; 0 if nothing varies.

        In a symmetric table, cells of one member against itself are left out: they vary less or not
        at all.
        """
        # Sorted, so that sums are the same bit for bit after a resume.
        played = [
            cell
            for key, cell in sorted(self.cells.items())
            if cell.matches > 1 and not (self.symmetric and len(set(key)) == 1)
        ]
        squares = sum((cell.squares for cell in played), np.zeros(self.players))
        return squares / max(1, sum(cell.matches - 1 for cell in played))

    def grow(self, sizes: Sequence[int]) -> None:
        """Set the sizes of the pools. Raises ValueError if one would become smaller."""
        if len(sizes) != self.players or any(
            new < old for new, old in zip(sizes, self.sizes, strict=False)
        ):
            raise ValueError(f"pools cannot shrink: from {self.sizes} to {list(sizes)}")
        if self.symmetric and len(set(sizes)) > 1:
            raise ValueError(f"a symmetric game has one pool, not pools of {list(sizes)}")
        self.sizes = list(sizes)

    def record(self, members: Members, payoffs: Sequence[float]) -> None:
        """Count one match. Raises ValueError for invalid members or payoffs."""
        self._cell(members).add(self._canonical(members, payoffs))

    def record_all(self, members: Members, payoffs: Array) -> None:
        """Count many matches of the same members, payoffs [m, n]. Raises the errors of `record`."""
        given = np.asarray(payoffs, dtype=np.float64)
        if given.ndim != 2 or given.shape[1] != self.players or not np.isfinite(given).all():
            raise ValueError(f"every match must have {self.players} finite payoffs")
        if self.symmetric:
            given = _shared(self.key(members), given[:, list(_order(members))])
        self._cell(members).add_all(given)

    def settle(self, members: Members, payoffs: Sequence[float]) -> None:
        """Set a cell's exact expected payoffs. Raises the errors of `record`."""
        cell = self._cell(members)
        cell.mean, cell.exact = self._canonical(members, payoffs), True

    def cell(self, members: Members) -> PayoffEntry | None:
        """Return the entry of these members, in the order of `key(members)`; None if never
        played."""
        self._check(members)
        return self.cells.get(self.key(members))

    def key(self, members: Members) -> Members:
        """Return the cell that these members belong to."""
        return tuple(sorted(members)) if self.symmetric else members

    def all(self) -> Iterator[Members]:
        """Yield all cells, played or not, each once."""
        if self.symmetric:
            yield from itertools.combinations_with_replacement(range(self.sizes[0]), self.players)
        else:
            yield from itertools.product(*map(range, self.sizes))

    def tensor(self, places: Sequence[Sequence[int]] | None = None) -> Array:
        """Return the mean payoffs [n, k_1, ..., k_n] of each role's members at `places`, or of all.

        Raises ValueError while a cell is missing.
        """
        chosen = [list(range(size)) for size in self.sizes] if places is None else places
        found = np.empty((self.players, *map(len, chosen)))
        at: Any
        for at in itertools.product(*(range(len(one)) for one in chosen)):
            members = tuple(one[k] for one, k in zip(chosen, at, strict=True))
            cell = self.cells.get(self.key(members))
            if cell is None:
                raise ValueError(f"the members {members} have not played each other")
            found[(slice(None), *at)] = self._played(members, cell.mean)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values, from which `from_json` restores the same bits."""
        cells = [
            [list(key), cell.mean.tolist(), cell.squares.tolist(), cell.matches, cell.exact]
            for key, cell in sorted(self.cells.items())
        ]
        return {"sizes": self.sizes, "symmetric": self.symmetric, "cells": cells}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PayoffTable:
        """Return the table that `to_json` wrote."""
        cells = {
            tuple(key): PayoffEntry(np.array(mean), np.array(squares), matches, exact)
            for key, mean, squares, matches, exact in values["cells"]
        }
        return cls(list(values["sizes"]), values["symmetric"], cells)

    def _cell(self, members: Members) -> PayoffEntry:
        self._check(members)
        zeros = np.zeros(self.players)
        return self.cells.setdefault(self.key(members), PayoffEntry(zeros, zeros.copy()))

    def _check(self, members: Members) -> None:
        if len(members) != self.players or not all(
            0 <= one < size for one, size in zip(members, self.sizes, strict=False)
        ):
            raise ValueError(f"there are no members {members} in pools of {self.sizes}")

    def _canonical(self, members: Members, payoffs: Sequence[float]) -> Array:
        """Return payoffs in the order of the cell's players."""
        given = np.asarray(payoffs, dtype=np.float64)
        if given.shape != (self.players,) or not np.isfinite(given).all():
            raise ValueError(f"a match must have {self.players} finite payoffs, not {payoffs}")
        if not self.symmetric:
            return given
        return _shared(self.key(members), given[list(_order(members))])

    def _played(self, members: Members, mean: Array) -> Array:
        """Return a cell's payoffs in the order of `members`."""
        if not self.symmetric:
            return mean
        found = np.empty_like(mean)
        found[list(_order(members))] = mean
        return found


def _shared(members: Members, payoffs: Array) -> Array:
    """Return payoffs [..., n] in which copies of one member have their mean."""
    found: Array = payoffs.copy()
    for member in set(members):
        seats = [seat for seat, one in enumerate(members) if one == member]
        if len(seats) > 1:
            found[..., seats] = payoffs[..., seats].mean(axis=-1, keepdims=True)
    return found


def _order(members: Members) -> tuple[int, ...]:
    """Return seats in the order of the members in them."""
    return tuple(sorted(range(len(members)), key=lambda seat: (members[seat], seat)))


@dataclass(frozen=True, slots=True)
class Precision:
    """The required precision of payoffs, from which numbers of matches follow.

    In a symmetric table numbers of matches are rounded up to multiples of the number of players, so
    that each member plays in every seat.
    """

    least: int = 8
    """Minimum matches per cell; at least 2, for a variance."""
    most: int = 256
    """Maximum matches per cell, however uncertain it is."""
    half_width: float = math.inf
    """Required half width of each cell's 95 % confidence interval (`PayoffEntry.half_width`);
    infinite: `least` matches are enough."""


def matches_due(table: PayoffTable, precision: Precision) -> list[tuple[Members, int]]:
    """Return the cells that need matches, with their numbers of matches; least certain cells first.

    Cells that were never played come first. An uncertain cell gets as many matches as its variance
    implies, but at most as many as it has, since the variance is itself an estimate.
    """
    pooled = table.pooled
    found = []
    for order, members in enumerate(table.all()):
        cell = table.cell(members)
        if cell is not None and cell.exact:
            continue
        played = 0 if cell is None else cell.matches
        width = math.inf if cell is None else cell.half_width(pooled)
        wanted = max(precision.least, 2)
        if played >= wanted and width > precision.half_width:
            assert cell is not None  # unplayed cells were handled above
            enough = played * (width / precision.half_width) ** 2
            wanted = min(math.ceil(enough), 2 * played, precision.most)
        if table.symmetric:
            wanted = math.ceil(wanted / table.players) * table.players
        due = wanted - played
        if due > 0:
            found.append((played > 0, -width, order, members, due))
    return [(members, due) for *_, members, due in sorted(found)]


def seats(players: int, episode: int) -> tuple[int, ...]:
    """Return the seating of an episode: `seats[i]` is the seat of player i.

    In `players` consecutive episodes each player takes every seat once. The cyclic order of the
    players changes after that, until all `players!` arrangements have occurred.
    """
    turn, shift = divmod(episode, players)
    others, order = list(range(1, players)), [0]
    while others:
        turn, digit = divmod(turn, len(others))
        order.append(others.pop(digit))
    return tuple((place + shift) % players for place in order)


def episode_of_match(players: int, match: int) -> int:
    """Return the episode number to pass to `seats` for a match of a game that may change seats
    itself.

    These seatings change more slowly than in a game that calls `seats` match by match, so
    that every arrangement occurs equally often, whether the game changes seats or not.
    """
    slow = match // players
    order = slow // math.lcm(players, math.factorial(players - 1))
    return order * players + slow % players
