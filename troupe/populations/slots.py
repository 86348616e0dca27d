"""Assignment of a population's members to its few served slots, for training and matches."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from troupe.populations.payoffs import Members

Name = TypeVar("Name", bound=Hashable)
Mixture = Mapping[str, float]


def share_slots(
    mixtures: Sequence[Mixture], slots: int, seed: Sequence[int]
) -> tuple[list[str], list[dict[str, float]]]:
    """Choose the members to load into `slots` slots; returns them and the mixtures over them.

    If all members of the mixtures fit, the mixtures do not change. Otherwise `slots` members are
    drawn from the mean of the mixtures by systematic resampling (Kitagawa 1996), so that over many
    draws each member has its share. Deterministic in `seed`. Raises ValueError for an empty
    mixture.
    """
    if any(not mixture for mixture in mixtures):
        raise ValueError("a mixture of nobody")
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

    Returns, per wave, the members to load in each pool and the cells to play. `pool_of[i]`: the
    pool of player i; `slots`: how many members of a pool are served at once. Greedy: a wave starts
    with the first remaining cell, then loads the member that makes most further cells playable.
    Raises ValueError for a cell that does not fit.
    """
    left, waves = list(cells), []
    while left:
        loaded: dict[Name, list[int]] = {pool: [] for pool in slots}
        for pool, member in zip(pool_of, left[0], strict=True):
            if member not in loaded[pool]:
                loaded[pool].append(member)
        if any(len(members) > slots[pool] for pool, members in loaded.items()):
            raise ValueError(f"the members {left[0]} do not fit into slots {dict(slots)}")
        while (more := _best_next(left, pool_of, slots, loaded)) is not None:
            loaded[more[0]].append(more[1])
        played = [cell for cell in left if _missing(cell, pool_of, loaded) == set()]
        done = set(played)
        left = [cell for cell in left if cell not in done]
        waves.append(({pool: sorted(members) for pool, members in loaded.items()}, played))
    return waves


def training_seat(turn: int, players: int) -> int:
    """The index of the agent that a learner plays in its query number `turn`.

    The agents take turns, with a shift that keeps them out of step with workflows that themselves
    change the agents' seats from query to query.
    """
    return (turn + turn // players) % players


def _best_next(
    left: Sequence[Members],
    pool_of: Sequence[Name],
    slots: Mapping[Name, int],
    loaded: Mapping[Name, list[int]],
) -> tuple[Name, int] | None:
    """The missing member that completes most cells; None if none helps or fits a slot."""
    counts: dict[tuple[Name, int], int] = {}
    for cell in left:
        missing = _missing(cell, pool_of, loaded)
        for one in missing:
            if len(loaded[one[0]]) < slots[one[0]]:
                counts[one] = counts.get(one, 0) + (1000 if len(missing) == 1 else 1)
    return max(counts, key=lambda one: counts[one]) if counts else None


def _missing(
    cell: Members, pool_of: Sequence[Name], loaded: Mapping[Name, list[int]]
) -> set[tuple[Name, int]]:
    pairs = zip(pool_of, cell, strict=True)
    return {(pool, member) for pool, member in pairs if member not in loaded[pool]}


def _scaled(mixture: Mixture) -> dict[str, float]:
    total = sum(mixture.values())
    return {name: share / total for name, share in mixture.items() if share > 0} if total else {}


def visible_cells(places: Sequence[Sequence[int]], *, symmetric: bool) -> list[Members]:
    """The cells of the members at `places[i]` of each role i."""
    if symmetric:
        return list(itertools.combinations_with_replacement(sorted(places[0]), len(places)))
    return list(itertools.product(*places))
