"""Assignment of a population's members to its few served slots, for training and matches."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from troupe.populations.payoffs import Members

Name = TypeVar("Name", bound=Hashable)
Mixture = Mapping[str, float]


def share_slots(
    mixtures: Sequence[Mixture], slots: int, seed: Sequence[int]
) -> tuple[list[str], list[dict[str, float]]]:
    """Choose the members to load into `slots` slots, and return them and the mixtures over them.

    If all members of the mixtures fit, the mixtures do not change. Otherwise `slots` members are
    drawn from the mean of the mixtures by systematic resampling (Kitagawa 1996), so that over many
    draws each member has its share. Deterministic in `seed`. Raises ValueError for an empty
    mixture.
    """
    if any(not mixture for mixture in mixtures):
        raise ValueError("an empty mixture")
    names = list(dict.fromkeys(name for mixture in mixtures for name in mixture))
    names = [name for name in names if any(mixture.get(name, 0.0) > 0 for mixture in mixtures)]
    if len(names) <= slots:
        return names, [_scaled(mixture) for mixture in mixtures]
    mean = np.array([sum(_scaled(one).get(name, 0.0) for one in mixtures) for name in names])
    mean = mean / mean.sum()
    rng = np.random.default_rng(tuple(seed))
    # Shuffled, so that neighbours are not always drawn together.
    order = rng.permutation(len(names))
    points = (rng.random() + np.arange(slots)) / slots
    ends = np.cumsum(mean[order])
    drawn = order[np.minimum(np.searchsorted(ends, points, side="right"), len(names) - 1)]
    counts = np.bincount(drawn, minlength=len(names))
    loaded = [names[at] for at in np.flatnonzero(counts)]
    found = []
    for mixture in mixtures:
        own = _scaled(mixture)
        # Importance weights: the mixture's share over the mean's share, times the draws.
        parts = {
            name: counts[at] * own.get(name, 0.0) / mean[at]
            for at, name in enumerate(names)
            if counts[at]
        }
        found.append(_scaled(parts) or {name: 1.0 / len(loaded) for name in loaded})
    return loaded, found


def match_waves(
    cells: Sequence[Members], pool_of: Sequence[Name], slots: Mapping[Name, int]
) -> list[tuple[dict[Name, list[int]], list[Members]]]:
    """Schedule matches in waves that play every cell with few loads of members.

    Return, per wave, the members to load in each pool and the cells to play. `pool_of[i]`: the pool
    of player i; `slots`: how many members of a pool are served at once. Greedy: a wave starts with
    the first remaining cell, then repeatedly loads the member that makes the most further cells
    playable; ties go to the member of the earliest cell. The time per wave grows with its members
    times all members, not with the cells. Raises ValueError for a cell that does not fit.
    """
    unplayed = _UnplayedCells(cells, pool_of)
    waves: list[tuple[dict[Name, list[int]], list[Members]]] = []
    while (first := unplayed.first()) is not None:
        loaded: dict[Name, list[int]] = {pool: [] for pool in slots}
        for pool, member in unplayed.members_of[first]:
            loaded[pool].append(member)
        if any(len(members) > slots[pool] for pool, members in loaded.items()):
            raise ValueError(f"the members {cells[first]} do not fit into slots {dict(slots)}")
        wave = [(pool, member) for pool, members in loaded.items() for member in members]
        played = unplayed.load(wave)
        while (more := unplayed.best(slots, loaded)) is not None:
            loaded[more[0]].append(more[1])
            wave.append(more)
            played += unplayed.load([more])
        unplayed.end_wave(wave, played)
        chosen = {pool: sorted(members) for pool, members in loaded.items()}
        waves.append((chosen, [cells[at] for at in sorted(played)]))
    return waves


class _UnplayedCells(Generic[Name]):
    """Cells that no wave has played, and each member's score for the wave that is being loaded.

    A member scores 1000 for a cell that lacks only this member, and 1 for one that lacks more.
    """

    def __init__(self, cells: Sequence[Members], pool_of: Sequence[Name]) -> None:
        """Index all cells by their members."""
        self.members_of = [list(dict.fromkeys(zip(pool_of, one, strict=True))) for one in cells]
        self._cells_of: dict[tuple[Name, int], list[int]] = {}
        for at, members in enumerate(self.members_of):
            for one in members:
                self._cells_of.setdefault(one, []).append(at)
        self._played = bytearray(len(cells))
        self._first = 0
        self._missing = [len(members) for members in self.members_of]
        # Scores with nothing loaded, and scores in the present wave of members that it may still
        # load.
        self._empty = {
            one: sum(1000 if self._missing[at] == 1 else 1 for at in inside)
            for one, inside in self._cells_of.items()
        }
        self._scores = dict(self._empty)

    def first(self) -> int | None:
        """Return the index of the first cell; None if all are played."""
        found = self._played.find(0, self._first)
        self._first = found if found >= 0 else len(self._played)
        return found if found >= 0 else None

    def best(
        self, slots: Mapping[Name, int], loaded: Mapping[Name, list[int]]
    ) -> tuple[Name, int] | None:
        """Return the missing member with the highest score; None if none helps or fits a slot."""
        room = {pool for pool, members in loaded.items() if len(members) < slots[pool]}
        open_ = [one for one, score in self._scores.items() if score and one[0] in room]
        most = max((self._scores[one] for one in open_), default=0)
        return min(
            (one for one in open_ if self._scores[one] == most), key=self._place, default=None
        )

    def load(self, members: Sequence[tuple[Name, int]]) -> list[int]:
        """Load members into the wave, and return the cells that have become complete."""
        whole = []
        for one in members:
            del self._scores[one]
        for one in members:
            for at in self._cells_of[one]:
                self._missing[at] -= 1
                if self._missing[at] == 0:
                    whole.append(at)
                elif self._missing[at] == 1:
                    last = [other for other in self.members_of[at] if other in self._scores]
                    if last:  # else it is loaded by this call, too
                        self._scores[last[0]] += 999
        return whole

    def end_wave(self, loaded: Sequence[tuple[Name, int]], played: Sequence[int]) -> None:
        """Remove the cells that the wave plays, and unload its members."""
        for at in played:
            self._played[at] = 1
            for one in self.members_of[at]:
                self._empty[one] -= 1000 if len(self.members_of[at]) == 1 else 1
        for one in loaded:
            for at in self._cells_of[one]:
                self._missing[at] = len(self.members_of[at])
            self._cells_of[one] = [at for at in self._cells_of[one] if not self._played[at]]
        self._scores = dict(self._empty)

    def _place(self, one: tuple[Name, int]) -> tuple[int, int]:
        """Return the member's first cell and its position in it."""
        at = self._cells_of[one][0]
        return at, self.members_of[at].index(one)


def training_seat(turn: int, players: int) -> int:
    """Return the index of the agent that a learner plays in its query number `turn`.

    The agents take turns, with a shift that keeps them out of step with workflows that themselves
    change the agents' seats from query to query.
    """
    return (turn + turn // players) % players


def _scaled(mixture: Mixture) -> dict[str, float]:
    total = sum(mixture.values())
    return {name: share / total for name, share in mixture.items() if share > 0} if total else {}


def visible_cells(places: Sequence[Sequence[int]], *, symmetric: bool) -> list[Members]:
    """Return the cells of the members at `places[i]` of each role i."""
    if symmetric:
        return list(itertools.combinations_with_replacement(sorted(places[0]), len(places)))
    return list(itertools.product(*places))
