"""How much of a policy's step could be computed now, from what the experience store pushes."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a type of the stubs only
    from troupe.v1 import experience_store_pb2 as es


def ready_work(
    status: es.TableStatus | None, policy: str, micro_batch: int, accumulated: int
) -> int:
    """Micro-batches of `policy` that could be computed in the step of `status`; the optimizer step
    counts as one once no sample can come any more.

    `accumulated` samples are in the gradients already, all of which are claimed. Without a status
    (nothing was pushed yet) there is no work.
    """
    counts = None
    if status is not None:
        counts = next((one for one in status.counts if one.policy == policy), None)
    if status is None or counts is None:
        return 0
    # Claimed and not in the gradients: leased, and about to be computed.
    left = counts.ready + max(0, counts.claimed - accumulated)
    if status.sealed and counts.pending == 0:
        return math.ceil(left / micro_batch) + 1
    return left // micro_batch


class Arrivals:
    """When each micro-batch that waits became ready; they are computed in that order."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def note(self, ready: int, now: float) -> None:
        """So many wait now."""
        while len(self._times) > ready:
            self._times.popleft()
        while len(self._times) < ready:
            self._times.append(now)

    @property
    def oldest(self) -> float | None:
        """When the oldest became ready; None when none waits."""
        return self._times[0] if self._times else None
