"""`GameCopies`: copies of a small OpenSpiel game, played as arrays from its game tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from troupe.networks.vector import Actions, Observed, Spaces, Stepped
from troupe.populations.histories import Histories, cumulated
from troupe.rpc.errors import InvalidArgument

Indices = NDArray[np.int64]
Array = NDArray[np.float64]


@lru_cache(maxsize=8)
def histories_of(game: str) -> Histories:
    """Return the game tree of that name; it is built once per process."""
    return Histories.of(game)


class GameCopies:
    """Copies of a game whose tree can be walked (Kuhn and Leduc poker, ...).

    One agent, the `learner`, plays the seats `seats`, alternating from copy to copy; the other
    players are opponents, each drawn from its pool for every episode: uniformly random play unless
    `against` sets others. Chance and opponents move within a step. Without `seats` all players are
    agents, one of which acts in each step.

    Observations and legal actions are OpenSpiel's; agents that do not act observe zeros and may
    take any action. The global state is the observation of the acting player.
    """

    def __init__(
        self, copies: int, game: str | Histories = "leduc_poker", seats: Sequence[int] | None = (0,)
    ) -> None:
        """`game`: OpenSpiel's name, or its `Histories`. Raises the errors of `Histories.of`, and
        InvalidArgument for unknown seats."""
        self.histories = histories_of(game) if isinstance(game, str) else game
        tree = self.histories
        players = tree.form.players
        if seats is not None and (not seats or not set(seats) <= set(range(players))):
            raise InvalidArgument(
                f"names seats that a game of {players} players does not have",
                field="seats",
                value=list(seats),
                remedy=f"Name some of 0 to {players - 1}, or none at all: null.",
            )
        self.copies, self._seats = copies, None if seats is None else np.array(seats)
        self.agents: tuple[str, ...] = ("learner",)
        if seats is None:
            self.agents = tuple(f"player_{i}" for i in range(players))
        # Information sets of all players in one list, so that one look-up serves all players.
        counts = [len(legal) for legal in tree.legal]
        self._first = np.concatenate([[0], np.cumsum(counts)])
        movers = tree.actor < players
        self._set = np.where(movers, tree.sets + self._first[tree.actor * movers], 0)
        self._tensors = np.concatenate(tree.tensors)
        self._legal = np.concatenate(tree.legal)
        self._children = tree.children.astype(np.int64)
        self._width = self._children.shape[1]
        self._pools: list[tuple[Array, Array]] = []
        for player in range(players):
            self._pools.append((tree.uniform(player)[None], np.ones(1)))
        self._lay_out()
        numbers, steps = self._tensors.shape[1], tree.longest
        self._idle = seats is None
        if seats is not None:
            steps = max(len(tree.form.decisions[seat].levels) for seat in seats)
            # Whether a game may end before the learner has moved at all.
            self._idle = bool((tree.form.leaves[:, list(seats)] == 0).any())
        self.spaces = Spaces(numbers, numbers, self._legal.shape[1], steps)

    def against(self, player: int, tables: Sequence[Array], weights: Sequence[float]) -> None:
        """Set the pool of opponent `player`, of which one member is drawn per episode.

        `tables[k]`: probabilities of actions by information set [m, A] (`Histories`). Raises
        InvalidArgument for weights that are not a distribution over them.
        """
        shares = np.asarray(weights, dtype=np.float64)
        if len(tables) != len(shares) or (shares < 0).any() or not np.isclose(shares.sum(), 1.0):
            raise InvalidArgument(
                f"not a distribution over {len(tables)} members",
                field="weights",
                value=list(weights),
            )
        used = np.flatnonzero(shares > 0)
        rows = np.stack([tables[int(k)] for k in used])
        self._pools[player] = (rows, shares[used] / shares[used].sum())
        self._lay_out()

    def reset(self, seed: int) -> Observed:
        """Begin a game in every copy."""
        self._random = np.random.Generator(np.random.SFC64(seed))
        all_copies = np.arange(self.copies)
        players = self.histories.form.players
        self._node = np.zeros(self.copies, dtype=np.int64)
        if self._seats is None:
            self._seat = np.full(self.copies, -1)
        else:
            # The first copy's seat differs from reset to reset.
            turn = all_copies + int(self._random.integers(len(self._seats)))
            self._seat = self._seats[turn % len(self._seats)]
        # First row in `_rows` of each player's member of this episode; the last entry is for
        # chance.
        self._member = np.empty((self.copies, players + 1), dtype=np.int64)
        for player, (rows, shares) in enumerate(self._pools):
            drawn = self._random.choice(len(shares), size=self.copies, p=shares)
            self._member[:, player] = self._begin[player] + drawn * rows.shape[1]
        self._member[:, players] = self._begin[players]
        self._play_others(all_copies)
        return self._observed()

    def step(self, actions: Actions) -> Stepped:
        """Play the acting agents' actions, then chance and opponents up to an agent's next move."""
        tree = self.histories
        before = self._node
        ended = tree.actor[before] == tree.over
        if self._seats is None:
            who = np.where(ended, 0, tree.actor[before])
            chosen = np.take_along_axis(actions, who[:, None].astype(np.int64), axis=1)[:, 0]
        else:
            chosen = actions[:, 0]
        after = self._children[before, np.asarray(chosen, dtype=np.int64)]
        if (wrong := (after < 0) & ~ended).any():
            at = int(np.flatnonzero(wrong)[0])
            raise InvalidArgument(
                f"an illegal move in copy {at}", field="actions", value=int(chosen[at])
            )
        self._node = np.where(ended, before, after)
        self._play_others(np.flatnonzero(~ended))
        over = tree.actor[self._node] == tree.over
        returns = tree.returns[self._node]
        if self._seats is not None:
            returns = np.take_along_axis(returns, self._seat[:, None], axis=1)
        rewards = np.where((over & ~ended)[:, None], returns, 0.0).astype(np.float32)
        return Stepped(self._observed(), rewards, over, np.zeros(self.copies, dtype=np.bool_))

    def close(self) -> None:
        """Nothing to release."""

    def _observed(self) -> Observed:
        tree = self.histories
        at = self._set[self._node]
        seen, may = self._tensors[at], self._legal[at]
        who = tree.actor[self._node]
        over = who == tree.over
        if self._seats is not None:
            may[over] = True
            acting = ~over[:, None] if self._idle else None
            return Observed(seen[:, None], seen, may[:, None], acting)
        players = tree.form.players
        acting = who[:, None] == np.arange(players)
        observations = np.where(acting[:, :, None], seen[:, None], np.float32(0.0))
        return Observed(observations, seen, may[:, None] | ~acting[:, :, None], acting)

    def _play_others(self, games: Indices) -> None:
        """Play moves of chance and opponents in `games` until an agent is to move."""
        actor, node = self.histories.actor, self._node
        while True:
            who = actor[node[games]]
            if self._seats is None:
                waits = who != self.histories.chance
            else:
                waits = (who == self._seat[games]) | (who == self.histories.over)
            if waits.all():
                return
            games, who = games[~waits], who[~waits]
            at = node[games]
            rows = self._rows[self._member[games, who] + self.histories.sets[at]]
            drawn = self._random.random(len(games), dtype=np.float32)
            node[games] = self._children[at, (drawn[:, None] >= rows).sum(axis=1)]

    def _lay_out(self) -> None:
        """Stack cumulated distributions of all opponents and of chance into `_rows`."""
        blocks: list[Array] = [rows.reshape(-1, rows.shape[-1]) for rows, _ in self._pools]
        blocks.append(self.histories.chances)
        self._begin = np.concatenate([[0], np.cumsum([len(block) for block in blocks])])
        self._rows = np.concatenate([cumulated(block, self._width) for block in blocks])
