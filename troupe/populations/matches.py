"""Which matches are played next, and who meets whom: decisions over a `PayoffTable`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from troupe.populations.games import Array
from troupe.populations.payoffs import Members, PayoffTable


@dataclass(frozen=True, slots=True)
class Precision:
    """How well payoffs have to be known. In a symmetric table matches are counted up to whole turns
    of its players, in which everybody sits everywhere."""

    least: int = 8
    """Matches of every cell; at least 2, without which no variance is known."""
    most: int = 256
    """After so many a cell is as good as it gets."""
    half_width: float = math.inf
    """Of each cell's 95 % confidence interval (`Cell.half_width`); infinite: `least` matches are
    enough."""


def matches_due(
    table: PayoffTable, precision: Precision, playing: Mapping[Members, int] | None = None
) -> list[tuple[Members, int]]:
    """Cells that need matches and how many now: those never played first, then the least certain.

    `playing`: matches that are under way already. An uncertain cell is given as many as its
    variance says it lacks, at most doubling what it has, since the variance itself is a guess.
    """
    playing = playing or {}
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
            assert cell is not None  # it was played
            enough = played * (width / precision.half_width) ** 2
            wanted = min(math.ceil(enough), 2 * played, precision.most)
        if table.symmetric:
            wanted = math.ceil(wanted / table.players) * table.players
        due = wanted - played - playing.get(members, 0)
        if due > 0:
            found.append((played > 0, -width, order, members, due))
    return [(members, due) for *_, members, due in sorted(found)]


def draw_opponents(
    profile: Sequence[Array], player: int, episode: int, seed: int
) -> dict[int, int]:
    """The members that the other players use in one episode, by player.

    Drawn once per episode and never per step: a mixed strategy is a mixture of whole games.
    The same (`seed`, `player`, `episode`) always gives the same members.
    """
    rng = np.random.default_rng((seed, player, episode))
    return {
        other: int(rng.choice(len(weights), p=weights / weights.sum()))
        for other, weights in enumerate(profile)
        if other != player
    }


def seats(players: int, episode: int) -> tuple[int, ...]:
    """Who sits where in an episode: `seats[i]` is the place of player i.

    In as many episodes as there are players everybody sits everywhere, each in turn; who sits
    behind whom is another order every time, until all `players!` arrangements have come.
    """
    turn, shift = divmod(episode, players)
    others, order = list(range(1, players)), [0]
    while others:
        turn, digit = divmod(turn, len(others))
        order.append(others.pop(digit))
    return tuple((place + shift) % players for place in order)


def turn_beside(players: int, match: int) -> int:
    """The episode whose `seats` a match takes beside a game that may change seats itself.

    A game that keeps its seats comes through all arrangements. One that changes them by `seats`,
    from match to match, comes through all of its own for each of these: so they change more slowly,
    and whatever the game does, every arrangement is met equally often.
    """
    slow = match // players
    order = slow // math.lcm(players, math.factorial(players - 1))
    return order * players + slow % players
