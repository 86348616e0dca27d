"""A game's whole tree as arrays, for stepping thousands of copies of the game at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.populations.games import Array
from troupe.populations.tree import Indices, SequenceForm, load_sequential

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Histories:
    """A finite game with perfect recall as arrays over histories; the empty history is number 0.

    Shapes: h histories, n players, A actions, m information sets of a player, d numbers of an
    observation, w = the larger of A and the most outcomes of a chance node.
    """

    form: SequenceForm
    """The game in sequence form; a player's sets have the same numbers here and there."""
    actor: NDArray[np.int8]
    """The player who moves [h]; `chance` at chance nodes, `over` at terminal histories."""
    sets: Indices
    """The mover's information set [h]; at chance nodes a row of `chances`."""
    children: Indices
    """The next history by action or outcome [h, w]; -1 for none, itself at terminal ones."""
    chances: Array
    """Distributions of chance nodes [c, w]."""
    returns: Array
    """The players' returns at terminal histories [h, n]; elsewhere 0."""
    legal: tuple[Bools, ...]
    """By player, the legal actions of each set [m, A]."""
    tensors: tuple[Floats, ...]
    """By player, each set's information state as OpenSpiel gives it [m, d]."""
    longest: int
    """Number of the players' moves in the longest game."""

    @classmethod
    def of(cls, game: Any) -> Histories:
        """Read an OpenSpiel game, given by name or loaded.

        Raises the errors of `SequenceForm.of`, and ValueError for a game without information state
        tensors.
        """
        loaded = load_sequential(game)
        if not loaded.get_type().provides_information_state_tensor:
            raise ValueError(f"{game} has no information state tensors, which networks observe")
        return _HistoryReading(loaded, SequenceForm.of(loaded)).histories()

    @property
    def chance(self) -> int:
        """The value of `actor` at chance nodes."""
        return self.form.players

    @property
    def over(self) -> int:
        """The value of `actor` at terminal histories."""
        return self.form.players + 1

    @property
    def actions(self) -> int:
        """The number A of actions."""
        return int(self.legal[0].shape[1])

    def uniform(self, player: int) -> Array:
        """Return the uniform policy over legal actions [m, A]."""
        legal = self.legal[player]
        found: Array = legal / legal.sum(axis=1, keepdims=True)
        return found

    def plan(self, player: int, table: Array) -> Array:
        """Return the plan [s] of a policy: probabilities of actions by set [m, A].

        Raises ValueError for a row that is not a distribution over legal actions.
        """
        legal = self.legal[player]
        if table.shape != legal.shape:
            raise ValueError(f"probabilities have the shape {table.shape}, not {legal.shape}")
        wrong = ~np.isclose((table * legal).sum(axis=1), 1.0, atol=1e-5) | (table < 0).any(axis=1)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{table[at].tolist()} at set {at} is not a distribution over its actions"
            )
        return self.form.plan(player, [row[may] for row, may in zip(table, legal, strict=True)])

    def table(self, player: int, plan: Array) -> Array:
        """Return the policy [m, A] of a plan; uniform in sets that the plan never reaches."""
        found = np.zeros(self.legal[player].shape)
        behaviour = self.form.behaviour(player, plan).values()
        for row, shares in zip(found, behaviour, strict=True):
            for action, share in shares.items():
                row[action] = share
        return found


def cumulated(shares: Array, width: int) -> Floats:
    """Return cumulative probabilities of rows [r, A] as [r, width], for drawing by comparison.

    Entries from the last possible action on are 2, which no uniform draw reaches.
    """
    found = np.full((len(shares), width), 2.0, dtype=np.float32)
    columns = np.arange(shares.shape[1])
    last = np.where(shares > 0, columns, -1).max(axis=1)
    total = shares.sum(axis=1, keepdims=True)
    below = columns < last[:, None]
    found[:, : shares.shape[1]] = np.where(below, np.cumsum(shares, axis=1) / total, 2.0)
    return found


@dataclass
class _HistoryReading:
    """One walk over all histories of a game."""

    game: Any
    form: SequenceForm
    actor: list[int] = field(default_factory=list)
    sets: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    chances: dict[tuple[float, ...], int] = field(default_factory=dict)
    longest: int = 0

    def __post_init__(self) -> None:
        self.numbers = [
            {name: i for i, name in enumerate(ours.names)} for ours in self.form.decisions
        ]
        self.tensors: list[list[Any]] = [[None] * len(names) for names in self.numbers]

    def histories(self) -> Histories:
        players, actions = self.form.players, self.game.num_distinct_actions()
        self._visit(self.game.new_initial_state(), 0)
        width = max(actions, max(map(len, self.children)))
        children = np.full((len(self.actor), width), -1, dtype=np.int64)
        for row, found in zip(children, self.children, strict=True):
            row[: len(found)] = found
        over = np.array(self.actor) == players + 1
        children[over] = np.flatnonzero(over)[:, None]
        legal = []
        for ours in self.form.decisions:
            may = np.zeros((len(ours.names), actions), dtype=np.bool_)
            for row, allowed in zip(may, ours.actions, strict=True):
                row[list(allowed)] = True
            legal.append(may)
        chances = np.zeros((len(self.chances), width))
        for shares, at in self.chances.items():
            chances[at, : len(shares)] = shares
        return Histories(
            form=self.form,
            actor=np.array(self.actor, dtype=np.int8),
            sets=np.array(self.sets, dtype=np.int64),
            children=children,
            chances=chances,
            returns=np.array(self.returns, dtype=np.float64),
            legal=tuple(legal),
            tensors=tuple(np.array(rows, dtype=np.float32) for rows in self.tensors),
            longest=self.longest,
        )

    def _visit(self, state: Any, moves: int) -> int:
        number, players = len(self.actor), self.form.players
        self.children.append([])
        self.actor.append(players + 1)
        self.sets.append(0)
        self.returns.append([0.0] * players)
        if state.is_terminal():
            self.returns[number] = list(state.returns())
            self.longest = max(self.longest, moves)
        elif state.is_chance_node():
            outcomes, shares = zip(*state.chance_outcomes(), strict=True)
            self.actor[number] = players
            self.sets[number] = self.chances.setdefault(shares, len(self.chances))
            self.children[number] = [self._visit(state.child(one), moves) for one in outcomes]
        else:
            player = state.current_player()
            at = self.numbers[player][state.information_state_string(player)]
            self.actor[number], self.sets[number] = player, at
            if self.tensors[player][at] is None:
                self.tensors[player][at] = state.information_state_tensor(player)
            found = [-1] * self.game.num_distinct_actions()
            for action in state.legal_actions():
                found[action] = self._visit(state.child(action), moves + 1)
            self.children[number] = found
        return number
