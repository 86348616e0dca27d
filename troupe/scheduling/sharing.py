"""Sharing of a job between rollout workers: its window of trajectories, by each worker's measured
speed, and the attached servers; one worker keeps each server, and all use it.

Pure, so that a restarted orchestrator decides alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, TypeVar

S = TypeVar("S", bound=Hashable)

# Trajectories that must end on a worker between two changes of its share: their lengths differ.
WINDOW_ENDS: Final = 16
# How far a window moves a share towards what would make all workers equally fast. Half of the way:
# trajectories that were begun under the former share still end in the next window.
DAMPING: Final = 0.5
# What remains of a share's logarithm after a window: where all workers are equally fast, chance
# alone would drive shares apart.
MEMORY: Final = 0.95
# Bounds of a share, over the average: a worker that was slow once is still tried.
LEAST_SHARE: Final = 1 / 8
MOST_SHARE: Final = 8.0


class CapacityShares:
    """Rollout workers' shares of a window of trajectories, learned from the durations on each
    worker.

    The shares equalize the time of a trajectory: a worker with above-average times has too many for
    its engines or its processor, and gets a smaller share. Shares are relative to each other; an
    unknown worker has 1.
    """

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        # Sum of seconds and number of the trajectories that ended in the present window.
        self._sums: dict[str, tuple[float, int]] = {}

    def share(self, worker_id: str) -> float:
        """Return the worker's share, 1 on average."""
        return self._shares.get(worker_id, 1.0)

    def ended(self, worker_id: str, seconds: float) -> None:
        """Record a trajectory that ran for `seconds` on a worker. Shares change when every worker
        that takes part has had enough of them."""
        if seconds <= 0:
            return
        total, count = self._sums.get(worker_id, (0.0, 0))
        self._sums[worker_id] = (total + seconds, count + 1)
        if len(self._sums) > 1 and all(n >= WINDOW_ENDS for _, n in self._sums.values()):
            self._adapt()
            self._sums = {}

    def forget(self, worker_id: str) -> None:
        """Forget a lost worker. Idempotent."""
        self._shares.pop(worker_id, None)
        self._sums.pop(worker_id, None)

    def _adapt(self) -> None:
        means = {worker: total / count for worker, (total, count) in self._sums.items()}
        middle = math.exp(sum(math.log(mean) for mean in means.values()) / len(means))
        for worker, mean in means.items():
            self._shares[worker] = self.share(worker) ** MEMORY * (middle / mean) ** DAMPING
        average = sum(self._shares.values()) / len(self._shares)
        for worker, share in self._shares.items():
            self._shares[worker] = min(MOST_SHARE, max(LEAST_SHARE, share / average))


def keepers(
    servers: Sequence[S], workers: Collection[str], former: Mapping[S, str]
) -> dict[S, str]:
    """Return the worker that keeps each attached server: brings it to new weights, and looks after
    it.

    A server stays with its former keeper while that is among `workers`: a change costs a load of
    the weights. The others go to the workers that keep the fewest, in the order of their ids. Empty
    without workers.
    """
    kept = Counter(dict.fromkeys(workers, 0))
    found: dict[S, str] = {}
    for server in servers:
        if (worker := former.get(server)) in kept:
            found[server] = str(worker)
            kept[str(worker)] += 1
    for server in servers:
        if server not in found and kept:
            worker = min(kept, key=lambda one: (kept[one], one))
            found[server] = worker
            kept[worker] += 1
    return {server: found[server] for server in servers if server in found}


def split_limit(limit: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Return how many turns each worker may run at once on a server that runs `limit` in all.

    In proportion to the workers' shares, whole turns, by largest remainder; every worker may run
    one, even if that are more than `limit` in all: else its trajectories would wait for ever.
    """
    if limit < 1:
        raise ValueError(f"limit = {limit}: a server runs one turn at least")
    total = sum(shares.values())
    exact = {worker: limit * share / total for worker, share in shares.items()}
    found = {worker: math.floor(part) for worker, part in exact.items()}
    left = limit - sum(found.values())
    for worker in sorted(exact, key=lambda one: (found[one] - exact[one], one))[:left]:
        found[worker] += 1
    return {worker: max(1, turns) for worker, turns in found.items()}
