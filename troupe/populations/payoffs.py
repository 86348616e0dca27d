"""`PayoffTable`: what the members of the pools got against each other, and how sure that is."""

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


# One member of each role's pool, by its place in it.
Members = tuple[int, ...]


@dataclass
class PayoffEntry:
    """The matches of one joint choice of members."""

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
        """Count many matches [m, n] at one stroke (Chan et al. 1979, section 2)."""
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
        """Of one match, per player [n]; infinite before the second."""
        if self.exact:
            return np.zeros_like(self.mean)
        if self.matches < 2:
            return np.full_like(self.mean, math.inf)
        return self.squares / (self.matches - 1)

    def half_width(self, pooled: Array | None = None, confidence: float = 0.95) -> float:
        """Of the confidence interval (Student's) of the least certain player's mean.

        `pooled` [n]: the variance in cells of this kind, `PayoffTable.pooled`. The cell varies at
        least as if one of its matches were such: where others vary, a few that all ended alike are
        no certainty.
        """
        if self.exact:
            return 0.0
        if self.matches < 2:
            return math.inf
        variance = self.variance
        if pooled is not None:
            variance = np.maximum(variance, pooled / self.matches)
        deviations = float(stdtrit(self.matches - 1, (1 + confidence) / 2))
        return deviations * math.sqrt(float(variance.max()) / self.matches)


@dataclass
class PayoffTable:
    """Empirical payoffs of pools that grow. Cells that were never played are missing.

    `symmetric`: all roles draw from one pool and only who the others are matters; then cells that
    differ in the order of their members are one cell, and copies of one member are one player: they
    get what they get on average, match by match.
    """

    sizes: list[int]
    """Members of each role's pool; all equal where the table is symmetric."""
    symmetric: bool = False
    cells: dict[Members, PayoffEntry] = field(default_factory=dict)

    @property
    def players(self) -> int:
        """Roles, each played by a member of its pool."""
        return len(self.sizes)

    @property
    def pooled(self) -> Array:
        """The variance of one match within its cell, per player [n]; 0 before anything varies. Of a
        symmetric table without cells of one member alone, which vary less or not at all."""
        # In one order, however the table came about: a resume adds up to the same bits.
        played = [
            cell
            for key, cell in sorted(self.cells.items())
            if cell.matches > 1 and not (self.symmetric and len(set(key)) == 1)
        ]
        squares = sum((cell.squares for cell in played), np.zeros(self.players))
        return squares / max(1, sum(cell.matches - 1 for cell in played))

    def grow(self, sizes: Sequence[int]) -> None:
        """The pools have so many members now. Raises ValueError if one has lost some."""
        if len(sizes) != self.players or any(
            new < old for new, old in zip(sizes, self.sizes, strict=False)
        ):
            raise ValueError(f"pools only grow: from {self.sizes} to {list(sizes)}")
        if self.symmetric and len(set(sizes)) > 1:
            raise ValueError(f"a symmetric game has one pool, not pools of {list(sizes)}")
        self.sizes = list(sizes)

    def record(self, members: Members, payoffs: Sequence[float]) -> None:
        """Count one whole match. Raises ValueError for members or payoffs that are none."""
        self._cell(members).add(self._canonical(members, payoffs))

    def record_all(self, members: Members, payoffs: Array) -> None:
        """Count many whole matches of the same members, payoffs [m, n]. Raises as `record`."""
        given = np.asarray(payoffs, dtype=np.float64)
        if given.ndim != 2 or given.shape[1] != self.players or not np.isfinite(given).all():
            raise ValueError(f"matches give {self.players} finite payoffs each")
        if self.symmetric:
            given = _shared(self.key(members), given[:, list(_order(members))])
        self._cell(members).add_all(given)

    def settle(self, members: Members, payoffs: Sequence[float]) -> None:
        """The expected payoffs are known exactly. Raises ValueError."""
        cell = self._cell(members)
        cell.mean, cell.exact = self._canonical(members, payoffs), True

    def cell(self, members: Members) -> PayoffEntry | None:
        """What is known of these members, its players in the order of `key(members)`."""
        self._check(members)
        return self.cells.get(self.key(members))

    def key(self, members: Members) -> Members:
        """The cell that these members belong to."""
        return tuple(sorted(members)) if self.symmetric else members

    def all(self) -> Iterator[Members]:
        """The cells that there are, played or not, each once."""
        if self.symmetric:
            yield from itertools.combinations_with_replacement(range(self.sizes[0]), self.players)
        else:
            yield from itertools.product(*map(range, self.sizes))

    def missing(self) -> list[Members]:
        """Cells that were never played."""
        return [members for members in self.all() if members not in self.cells]

    def tensor(self, places: Sequence[Sequence[int]] | None = None) -> Array:
        """Mean payoffs [n, k_1, ..., k_n]; of each role's members at `places`, or of all.

        Raises ValueError while a cell is missing.
        """
        chosen = [list(range(size)) for size in self.sizes] if places is None else places
        found = np.empty((self.players, *map(len, chosen)))
        at: Any
        for at in itertools.product(*(range(len(one)) for one in chosen)):
            members = tuple(one[k] for one, k in zip(chosen, at, strict=True))
            cell = self.cells.get(self.key(members))
            if cell is None:
                raise ValueError(f"the members {members} have not met")
            found[(slice(None), *at)] = self._played(members, cell.mean)
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; `from_json` gives the same bits back."""
        cells = [
            [list(key), cell.mean.tolist(), cell.squares.tolist(), cell.matches, cell.exact]
            for key, cell in sorted(self.cells.items())
        ]
        return {"sizes": self.sizes, "symmetric": self.symmetric, "cells": cells}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PayoffTable:
        """What `to_json` gave."""
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
        """Payoffs in the order of the cell's players."""
        given = np.asarray(payoffs, dtype=np.float64)
        if given.shape != (self.players,) or not np.isfinite(given).all():
            raise ValueError(f"a match gives {self.players} finite payoffs, not {payoffs}")
        if not self.symmetric:
            return given
        return _shared(self.key(members), given[list(_order(members))])

    def _played(self, members: Members, mean: Array) -> Array:
        """A cell's payoffs in the order of `members`."""
        if not self.symmetric:
            return mean
        found = np.empty_like(mean)
        found[list(_order(members))] = mean
        # Of a table that was written before these were one player.
        return _shared(members, found)


def _shared(members: Members, payoffs: Array) -> Array:
    """Payoffs [..., n] in which copies of one member have what they get on average."""
    found: Array = payoffs.copy()
    for member in set(members):
        seats = [seat for seat, one in enumerate(members) if one == member]
        if len(seats) > 1:
            found[..., seats] = payoffs[..., seats].mean(axis=-1, keepdims=True)
    return found


def _order(members: Members) -> tuple[int, ...]:
    """Seats by the member that sits there."""
    return tuple(sorted(range(len(members)), key=lambda seat: (members[seat], seat)))
