"""Scheduling of the matches that a payoff table needs next, and seating of members in a match."""

from __future__ import annotations

import math
from dataclasses import dataclass

from troupe.populations.payoffs import Members, PayoffTable


@dataclass(frozen=True, slots=True)
class Precision:
    """The required precision of payoffs, from which numbers of matches follow.

    In a symmetric table numbers of matches are rounded up to multiples of the number of players, so
    that each member plays on every seat.
    """

    least: int = 8
    """Fewest matches of a cell; at least 2, for a variance."""
    most: int = 256
    """Most matches of a cell, however uncertain it is."""
    half_width: float = math.inf
    """Wanted half width of each cell's 95 % confidence interval (`PayoffEntry.half_width`);
    infinite: `least` matches are enough."""


def matches_due(table: PayoffTable, precision: Precision) -> list[tuple[Members, int]]:
    """The cells that need matches, with their numbers of matches; least certain cells first.

    Cells that were never played come first of all. An uncertain cell gets as many matches as its
    variance implies, but at most as many as it has, since the variance is itself an estimate.
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
    """The seating of an episode: `seats[i]` is the seat of player i.

    In `players` consecutive episodes each player sits on every seat once. The cyclic order of the
    players changes after that, until all `players!` arrangements have occurred.
    """
    turn, shift = divmod(episode, players)
    others, order = list(range(1, players)), [0]
    while others:
        turn, digit = divmod(turn, len(others))
        order.append(others.pop(digit))
    return tuple((place + shift) % players for place in order)


def turn_beside(players: int, match: int) -> int:
    """The episode number to pass to `seats` for a match of a game that may change seats itself.

    These seatings change more slowly than those of a game that calls `seats` match by match, so
    that every arrangement occurs equally often, whether the game changes seats or not.
    """
    slow = match // players
    order = slow // math.lcm(players, math.factorial(players - 1))
    return order * players + slow % players
