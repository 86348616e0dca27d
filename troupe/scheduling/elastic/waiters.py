"""Which actions go ahead of others: those that more trajectories wait for."""

from __future__ import annotations

import math


def head_start(waiters: int, *, doubling: float = 1.0, most: float = 10.0) -> float:
    """Seconds by which an action counts as having come earlier than it did.

    Each doubling of its waiters is worth `doubling` seconds, all together at most `most`: nobody
    is passed by what arrives more than `most` seconds later, so nobody starves.
    """
    return min(most, doubling * math.log2(max(1, waiters)))


def group_waiters(begun: int, left: int) -> int:
    """Trajectories that wait for an action of one of a group, of which `begun` have begun and
    `left` have not ended: a group is trained on as a whole, so those that have ended wait for the
    others, and all of them for the last."""
    return 1 + max(0, begun - max(1, left))
