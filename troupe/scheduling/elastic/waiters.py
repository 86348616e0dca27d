"""Which actions go ahead of others: those that more trajectories wait for."""

from __future__ import annotations

import math


def head_start(waiters: int, *, doubling: float = 1.0, most: float = 10.0) -> float:
    """Seconds by which an action counts as having come earlier than it did.

    Each doubling of its waiters is worth `doubling` seconds, all together at most `most`: nobody
    is passed by what arrives more than `most` seconds later, so nobody starves.
    """
    return min(most, doubling * math.log2(max(1, waiters)))


def waiting_for_reward(members: int, ended: int) -> int:
    """Trajectories that wait for the reward of one of a group of `members`, of which `ended` have
    theirs already: a group is trained on as a whole, so the last reward is what all wait for."""
    if not 0 <= ended < max(1, members):
        return max(1, members)
    return 1 + ended
