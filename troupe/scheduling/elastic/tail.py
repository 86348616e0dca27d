"""What those who wait for one resource will have waited, when they have run: an estimate."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from troupe.scheduling.elastic.actions import Elastic


def waiting_seconds(
    waiting: Sequence[Elastic],
    free: int,
    releases: Iterable[tuple[float, int]],
    *,
    beyond: int = 0,
) -> float:
    """Sum of the times, from now on, at which `waiting` end, in seconds.

    A heap of completion times plays the queue in its order (ARL-Tangram, section 3). Each begins
    when its lowest level is free, and gets an even share of what is free then among all that still
    wait: alone it gets all that it can use, in a crowd its lowest level. (The paper does not say
    what its estimate gives them.) `free` units are there now, `releases` come after so many
    seconds. `beyond` more actions wait behind `waiting`: they end one after another at the pace
    at which those did. An action that never gets its units ends with the last release.
    """
    heap = list(releases)
    heapq.heapify(heap)
    now = total = 0.0
    left = len(waiting) + beyond
    latest = 0.0
    for option in waiting:
        while free < option.levels[0] and heap:
            now, units = heapq.heappop(heap)
            free += units
        index = option.within(max(option.levels[0], free // left))
        free -= option.levels[index]
        left -= 1
        end = now + option.seconds[index]
        heapq.heappush(heap, (end, option.levels[index]))
        total += end
        latest = max(latest, end)
    if waiting and beyond:
        pace = latest / len(waiting)
        total += beyond * latest + pace * beyond * (beyond + 1) / 2
    return total
