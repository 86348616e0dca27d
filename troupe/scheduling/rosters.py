"""Rosters: which queries join and leave a step that is held open, and when it is closed.

Where groups without signal are replaced the roster is a function of what the queries turned out
to be, not of when: queries join in order, one for each that is left with nothing. Where the first
to finish are taken, it is a function of who had finished at the moment of asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueryProgress:
    """One query of a step. `settled`: all its trajectories have ended and none of its rows waits
    for anything; `kept` of its rows were not dropped."""

    query_id: str
    complete: bool
    settled: bool
    kept: int


@dataclass(frozen=True)
class RosterMove:
    """`add` fresh queries; those that `leave`; whether nobody joins or leaves from then on."""

    add: int = 0
    leave: tuple[str, ...] = ()
    close: bool = False


def next_move(
    queries: Sequence[QueryProgress],
    *,
    wanted: int,
    spare: int,
    max_refills: int,
    may_close: bool = True,
    first_k: bool = False,
) -> RosterMove:
    """What to change about a roster that holds `queries` now.

    The step wants `wanted` queries and runs `spare` more; with `first_k` it closes as soon as so
    many are there, and the others leave. Each query that is settled with no row kept is replaced
    by a fresh one, at most `max_refills` times; 0: never, and such a query counts like any other.
    """
    replaced = [q for q in queries if q.settled and not q.kept] if max_refills else []
    refills = min(len(replaced), max_refills)
    add = max(0, wanted + spare + refills - len(queries))
    if not may_close:
        return RosterMove(add=add)
    if first_k:
        there = sum(q.settled if max_refills else q.complete for q in queries) - len(replaced)
        if there >= wanted:
            return RosterMove(
                leave=tuple(q.query_id for q in queries if not q.complete), close=True
            )
    if add:
        return RosterMove(add=add)
    exhausted = max_refills > 0 and not first_k and refills == max_refills
    over = all(q.settled if max_refills else q.complete for q in queries)
    return RosterMove(close=over or exhausted)
