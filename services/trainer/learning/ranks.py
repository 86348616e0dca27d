"""What a learner does together with others that hold parts of the same weights.

A learner alone computes all rows of a micro-batch. One rank of a gang (gang/group.py) computes its
share, but takes part in every pass of the others: their forward passes need its part of the
weights. So all ranks make the same number of passes, and decide together when to stop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self, TypeVar

from services.trainer.learning.packing import PackedBatch
from services.trainer.learning.samples import Row

S = TypeVar("S")


class Stopped(Exception):
    """The step was given up while it computed."""


class RankPieces:
    """The pieces of one rank, one after another; None where only others have one left.

    Iteration raises `Stopped` once `stop` is set, and ends once `problem` is.
    """

    def __init__(self, pieces: Sequence[PackedBatch], stop: threading.Event | None) -> None:
        self._left = list(reversed(pieces))
        self._stop = stop
        # Why what was computed is of no use.
        self.problem = ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch | None:
        if self.problem:
            raise StopIteration
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        if not self._left:
            raise StopIteration
        return self._left.pop()


class RankGroup:
    """Nobody: this learner holds the whole model."""

    # Ranks that hold it together.
    size = 1

    def share(self, rows: Sequence[Row]) -> list[int]:
        """Indices of the rows that this rank computes, of those that all ranks were given."""
        return list(range(len(rows)))

    def turns(self, pieces: Sequence[PackedBatch], stop: threading.Event | None) -> RankPieces:
        """Passes over `pieces`, which are of this rank's rows."""
        return RankPieces(pieces, stop)

    def merged(self, sums: S) -> S:
        """The sums (a dataclass) over all ranks."""
        return sums
