"""`SampledGame`: a meta-game whose payoffs are what members got in games that were played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from troupe.populations.games import Array
from troupe.populations.histories import Histories, cumulated
from troupe.populations.matches import Precision, matches_due
from troupe.populations.payoffs import Members, PayoffTable
from troupe.populations.psro import MetaGame
from troupe.populations.tree import Indices

# Games that move at once.
_TOGETHER: Final = 1 << 16


def play(
    histories: Histories,
    tables: Sequence[Array],
    members: Indices,
    random: np.random.Generator,
) -> Array:
    """Play games to their end: payoffs [g, n].

    `tables`: by player, probabilities of actions of its members [k, m, A]; `members` [g, n]: which
    of them play each game.
    """
    tree, width = histories, histories.children.shape[1]
    blocks = [one.reshape(-1, one.shape[-1]) for one in tables] + [tree.chances]
    first = np.concatenate([[0], np.cumsum([len(block) for block in blocks])])
    rows = np.concatenate([cumulated(block, width) for block in blocks])
    # Where each mover's member begins in `rows`; then chance.
    sets = np.array([one.shape[1] for one in tables])
    begin = np.concatenate(
        [members * sets + first[:-2], np.full((len(members), 1), first[-2])], axis=1
    )
    node, games = np.zeros(len(members), dtype=np.int64), np.arange(len(members))
    while True:
        at = node[games]
        runs = tree.actor[at] != tree.over
        games, at = games[runs], at[runs]
        if not len(games):
            break
        own = rows[begin[games, tree.actor[at]] + tree.sets[at]]
        drawn = random.random(len(games), dtype=np.float32)
        node[games] = tree.children[at, (drawn[:, None] >= own).sum(axis=1)]
    found: Array = tree.returns[node]
    return found


class SampledGame(MetaGame):
    """Cells that were never played, and those that are uncertain yet, are played; no others.

    What comes out is a function of the pools and the seed.
    """

    def __init__(self, histories: Histories, precision: Precision, seed: int = 0) -> None:
        """`precision`: how well payoffs have to be known."""
        self.form, self.histories, self.precision = histories.form, histories, precision
        players = histories.form.players
        self.pools = [[histories.form.uniform(player)] for player in range(players)]
        self.table = PayoffTable([1] * players)
        self._tables = [[histories.uniform(player)] for player in range(players)]
        self._seed, self._rounds = seed, 0
        self._play_due()

    def copy(self) -> SampledGame:
        """One that grows apart from this, with the matches played so far."""
        found = SampledGame.__new__(SampledGame)
        found.form, found.histories, found.precision = self.form, self.histories, self.precision
        found.pools = [list(pool) for pool in self.pools]
        found.table = PayoffTable.from_json(self.table.to_json())
        found._tables = [list(pool) for pool in self._tables]
        found._seed, found._rounds = self._seed, self._rounds
        found.payoffs = self.payoffs
        return found

    def _fill(self, player: int) -> None:
        """Matches of a pool's newest member."""
        self._tables[player].append(self.histories.table(player, self.pools[player][-1]))
        self.table.grow(self.sizes)
        self._play_due()

    def _play_due(self) -> None:
        while due := matches_due(self.table, self.precision):
            self._play(due)
        self.payoffs = self.table.tensor()

    def _play(self, due: Sequence[tuple[Members, int]]) -> None:
        """So many matches of each of these cells."""
        random = np.random.default_rng((self._seed, self._rounds))
        self._rounds += 1
        tables = [np.stack(pool) for pool in self._tables]
        counts = [count for _, count in due]
        members = np.repeat(np.array([cell for cell, _ in due]), counts, axis=0)
        parts = [
            play(self.histories, tables, members[at : at + _TOGETHER], random)
            for at in range(0, len(members), _TOGETHER)
        ]
        ends = np.cumsum(counts)[:-1]
        for (cell, _), found in zip(due, np.split(np.concatenate(parts), ends), strict=True):
            self.table.record_all(cell, found)
