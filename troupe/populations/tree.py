"""Extensive-form games in sequence form, as arrays: exact payoffs and best responses.

A *sequence* of a player is an information set with an action, or the empty one (number 0). A *plan*
[s] is a policy's realization plan: the probability with which its own choices lead to each sequence
(Koller, Megiddo and von Stengel 1996). Plans are linear: the plan of a policy that is drawn from a
pool per episode is the weighted mean of the pool's plans.

Agents that change seats know their seat, so an agent has one plan per seat. Their values and
NashConv are means over seatings: `seatings[k][seat]` is the agent on a seat in arrangement k; by
default all permutations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.populations.games import Array

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """The information sets of one player, deepest first (by its own moves before them)."""

    names: tuple[str, ...]
    """The game's names of the information states."""
    first: Indices
    """The sequence of each set's first legal action [m]; the others follow it."""
    actions: tuple[tuple[int, ...], ...]
    """Legal actions of each set."""
    parent: Indices
    """The player's sequence before each set [m]."""
    levels: tuple[slice, ...]
    """Sets of equal depth, deepest first."""
    sequences: int
    """The number of sequences, the empty one included."""


@dataclass(frozen=True)
class SequenceForm:
    """A finite game with perfect recall, in sequence form."""

    decisions: tuple[Decisions, ...]
    """By player: its information sets."""
    leaves: Indices
    """The sequence of each player at each terminal history [t, n]."""
    returns: Array
    """The returns of each player there, times the probability of chance [t, n]."""

    @classmethod
    def of(cls, game: Any) -> SequenceForm:
        """Read an OpenSpiel game, given by name (`leduc_poker`) or as a loaded `pyspiel.Game`.

        Walks the whole tree, so games may have up to some 10^5 histories. Raises ImportError
        without OpenSpiel, ValueError for simultaneous games and games without perfect recall.
        """
        loaded = load_sequential(game)
        return _Walk(loaded.num_players()).form(loaded.new_initial_state())

    @property
    def players(self) -> int:
        """The number of players."""
        return len(self.decisions)

    def uniform(self, player: int) -> Array:
        """Return the plan of the uniform policy over legal actions."""
        ours = self.decisions[player]
        return self.plan(player, [np.full(len(a), 1.0 / len(a)) for a in ours.actions])

    def plan(self, player: int, behaviour: Sequence[Array]) -> Array:
        """Return the plan of the policy that draws from `behaviour[i]` at set i."""
        ours = self.decisions[player]
        found = np.zeros(ours.sequences)
        found[0] = 1.0
        for level in reversed(ours.levels):
            for i in range(level.start, level.stop):
                at = int(ours.first[i])
                found[at : at + len(ours.actions[i])] = found[ours.parent[i]] * behaviour[i]
        return found

    def behaviour(self, player: int, plan: Array) -> dict[str, dict[int, float]]:
        """Return the policy of a plan by information state; uniform in sets that it never
        reaches."""
        ours = self.decisions[player]
        found = {}
        for name, at, actions in zip(ours.names, ours.first, ours.actions, strict=True):
            part: Array = plan[at : at + len(actions)]
            total = float(part.sum())
            shares = part / total if total > 0 else np.full(len(actions), 1.0 / len(actions))
            found[name] = dict(zip(actions, shares.tolist(), strict=True))
        return found

    def plan_of(self, player: int, policy: Mapping[str, Mapping[int, float]]) -> Array:
        """Return the plan of a policy by information state; uniform in sets that are not in it."""
        ours = self.decisions[player]
        rows = []
        for name, actions in zip(ours.names, ours.actions, strict=True):
            shares = policy.get(name)
            if shares is None:
                rows.append(np.full(len(actions), 1.0 / len(actions)))
            else:
                rows.append(np.array([shares.get(action, 0.0) for action in actions]))
        return self.plan(player, rows)

    def values(self, plans: Sequence[Array]) -> Array:
        """Return the expected returns [n] when each player i follows `plans[i]`."""
        reach = np.ones(len(self.leaves))
        for player, plan in enumerate(plans):
            reach *= plan[self.leaves[:, player]]
        found: Array = reach @ self.returns
        return found

    def gradient(self, player: int, plans: Sequence[Array]) -> Array:
        """Return the gradient [s] of a player's value in its own plan, while the others follow
        `plans`.

        The value of a plan is its product with this; `plans[player]` is not used.
        """
        weights = self.returns[:, player].copy()
        for other, plan in enumerate(plans):
            if other != player:
                weights *= plan[self.leaves[:, other]]
        sequences = self.decisions[player].sequences
        found: Any = np.bincount(self.leaves[:, player], weights, minlength=sequences)
        return np.asarray(found, dtype=np.float64)

    def best_response(
        self, player: int, plans: Sequence[Array], *, tremble: float = 0.0
    ) -> tuple[Array, float]:
        """Return a pure best response to the other players' plans, and its value against them.

        Takes the first of equally good actions, also in sets that the other plans never reach. With
        a small `tremble` the other players play uniformly with that probability (Selten 1975), so
        that actions in such sets are good ones, too.
        """
        ours = self.decisions[player]
        exact = self.gradient(player, plans)
        worth = exact.copy()
        if tremble:
            erring = [
                (1 - tremble) * plan + tremble * self.uniform(i) for i, plan in enumerate(plans)
            ]
            worth = self.gradient(player, erring)
        counts = np.array([len(actions) for actions in ours.actions])
        chosen = ours.first.copy()
        for level in ours.levels:
            first, count = ours.first[level], counts[level]
            for width in np.unique(count):
                rows = np.flatnonzero(count == width)
                table = worth[first[rows, None] + np.arange(width)]
                best = table.argmax(axis=1)
                chosen[level.start + rows] = first[rows] + best
                gained = table[np.arange(len(rows)), best]
                np.add.at(worth, ours.parent[level][rows], gained)
        plan = np.zeros(ours.sequences)
        plan[0] = 1.0
        for level in reversed(ours.levels):
            plan[chosen[level]] = plan[ours.parent[level]]
        return plan, float(plan @ exact)

    def nash_conv(self, plans: Sequence[Array]) -> float:
        """NashConv: the sum of the players' gains from best responses; 0 at a Nash equilibrium."""
        now = self.values(plans)
        best = [self.best_response(player, plans)[1] for player in range(self.players)]
        return float(np.sum(best) - now.sum())


def load_sequential(game: Any) -> Any:
    """Load a `pyspiel.Game` by name, or check a loaded one: players must move one by one.

    Raises ImportError without OpenSpiel, ValueError for unknown and for simultaneous games.
    """
    try:
        import pyspiel
    except ImportError as error:
        raise ImportError("exact games need OpenSpiel: `pip install 'troupe-rl[games]'`") from error
    # Checked first: for an unknown name OpenSpiel would print the names of all games.
    if isinstance(game, str) and game.partition("(")[0] not in pyspiel.registered_names():
        raise ValueError(f"OpenSpiel has no game named '{game}'")
    loaded = pyspiel.load_game(game) if isinstance(game, str) else game
    if loaded.get_type().dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        raise ValueError(
            f"in {game} players move simultaneously; load it through "
            "turn_based_simultaneous_game(game=...)"
        )
    return loaded


class _Walk:
    """The state of one walk over all histories of a game, from which `form` is built."""

    def __init__(self, players: int) -> None:
        # Per player: information state -> (number, sequence before it, depth, legal actions).
        self._sets: list[dict[str, tuple[int, tuple[int, int] | None, int, tuple[int, ...]]]] = [
            {} for _ in range(players)
        ]
        self._ends: list[tuple[list[tuple[int, int] | None], Array]] = []

    def form(self, root: Any) -> SequenceForm:
        self._visit(root, [None] * len(self._sets), [0] * len(self._sets), 1.0)
        # Sets by decreasing depth; the sequences of a set are adjacent.
        decisions, numbers = [], []
        for sets in self._sets:
            ordered = sorted(sets.items(), key=lambda item: (-item[1][2], item[1][0]))
            place: dict[tuple[int, int] | None, int] = {None: 0}
            first = []
            for _, (number, _, _, actions) in ordered:
                first.append(len(place))
                for action in actions:
                    place[number, action] = len(place)
            depths = [depth for _, (_, _, depth, _) in ordered]
            starts = [i for i, depth in enumerate(depths) if i == 0 or depth != depths[i - 1]]
            levels = tuple(
                slice(a, b) for a, b in zip(starts, [*starts[1:], len(depths)], strict=True)
            )
            decisions.append(
                Decisions(
                    names=tuple(name for name, _ in ordered),
                    first=np.array(first, dtype=np.int64),
                    actions=tuple(actions for _, (_, _, _, actions) in ordered),
                    parent=np.array([place[at] for _, (_, at, _, _) in ordered], dtype=np.int64),
                    levels=levels,
                    sequences=len(place),
                )
            )
            numbers.append(place)
        leaves = np.array(
            [[place[at] for place, at in zip(numbers, ats, strict=True)] for ats, _ in self._ends],
            dtype=np.int64,
        )
        return SequenceForm(tuple(decisions), leaves, np.array([got for _, got in self._ends]))

    def _visit(
        self, state: Any, at: list[tuple[int, int] | None], depth: list[int], chance: float
    ) -> None:
        if state.is_terminal():
            self._ends.append((list(at), chance * np.array(state.returns())))
            return
        if state.is_chance_node():
            for action, probability in state.chance_outcomes():
                self._visit(state.child(action), at, depth, chance * probability)
            return
        player = state.current_player()
        sets, name = self._sets[player], state.information_state_string(player)
        actions = tuple(state.legal_actions(player))
        known = sets.setdefault(name, (len(sets), at[player], depth[player], actions))
        if known[1] != at[player] or known[3] != actions:
            raise ValueError(f"player {player} forgets its own moves before {name!r}")
        before = at[player]
        depth[player] += 1
        for action in actions:
            at[player] = (known[0], action)
            self._visit(state.child(action), at, depth, chance)
        at[player] = before
        depth[player] -= 1


Plans = Sequence[Array]
"""Plans of all seats, one [s] for each, as `SequenceForm.plan` makes them."""
Seatings = Sequence[Sequence[int]]


def mixed(members: Sequence[Plans], shares: Sequence[float]) -> list[Array]:
    """Return the plans of an agent that plays one of `members` per episode, drawn by `shares`."""
    total = float(np.sum(shares))
    if len(members) != len(shares) or not members or total <= 0:
        raise ValueError(f"{len(members)} members cannot be mixed by the shares {list(shares)}")
    seats = range(len(members[0]))
    parts = list(zip(members, shares, strict=True))
    return [sum(share / total * plans[seat] for plans, share in parts) for seat in seats]  # type: ignore[misc]


def agent_values(
    form: SequenceForm, agents: Sequence[Plans], seatings: Seatings | None = None
) -> Array:
    """Return the expected return of each agent [n], averaged over all seatings."""
    found = np.zeros(len(agents))
    seatings = seatings or list(permutations(range(len(agents))))
    for seating in seatings:
        got = form.values([agents[agent][seat] for seat, agent in enumerate(seating)])
        found[list(seating)] += got
    return found / len(seatings)


def agent_nash_conv(
    form: SequenceForm, agents: Sequence[Plans], seatings: Seatings | None = None
) -> float:
    """NashConv: the sum of the agents' gains from best responses; 0 at a Nash equilibrium.

    With two agents it is twice the exploitability. Raises ValueError for more than two different
    agents that change seats: a best response would depend on the other agents' seats.
    """
    alike = all(plans is agents[0] for plans in agents)
    seatings = seatings or list(permutations(range(len(agents))))
    if len(agents) > 2 and len(seatings) > 1 and not alike:
        raise ValueError("best responses to several agents that change seats cannot be computed")
    seatings = seatings[:1] if alike else seatings
    return float(
        np.mean(
            [
                form.nash_conv([agents[agent][seat] for seat, agent in enumerate(seating)])
                for seating in seatings
            ]
        )
    )
