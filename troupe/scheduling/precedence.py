"""Precedence between jobs that share a cluster: a job's `priority` as time, and as a share.

Where jobs wait in line, a unit of priority counts as a minute of waiting. So nothing waits for
ever: what comes later overtakes only within the minutes by which its priority is higher. Where jobs
share all the time, their shares are in proportion to `share_of`.
"""

from __future__ import annotations

from typing import Final

MAX_PRIORITY: Final = 100
_SECONDS_PER_UNIT: Final = 60.0
# Units that double a share.
_UNITS_PER_DOUBLING: Final = 10


def waiting_seconds(priority: int) -> float:
    """Return the seconds of waiting that a priority counts as."""
    return _SECONDS_PER_UNIT * priority


def share_of(priority: int) -> float:
    """Return the share of a job in proportion to the share of a job of priority 0."""
    return float(2.0 ** (priority / _UNITS_PER_DOUBLING))
