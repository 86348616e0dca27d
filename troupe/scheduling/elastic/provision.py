"""How many workers are worth starting for what waits.

A worker that starts takes time, too. Nobody knows what will come, so the rule is that of ski rental
(Karlin et al. 1988): wait for a worker that is there as long as a start would take, and start one
then; that is never worse than twice the best. Where the work that waits is known to keep the
workers that are there busy for longer, more are started at once.
"""

from __future__ import annotations

import math


def workers_to_start(
    backlog_seconds: float, waited_seconds: float, alive: int, startable: int, cold_seconds: float
) -> int:
    """How many of `startable` workers to start now, beside the `alive` ones.

    `backlog_seconds` is the work of a single worker that waits or is left of what runs;
    `waited_seconds` how long the first has waited that has no worker; `cold_seconds` how long a
    worker takes to start.
    """
    if startable <= 0:
        return 0
    # Without any there is nobody to wait for.
    least = int(alive == 0 or waited_seconds >= cold_seconds)
    worth = math.floor(min(backlog_seconds / max(cold_seconds, 1e-9), alive + startable)) - alive
    return min(startable, max(least, worth))
