"""Placement: queries over rollout workers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutWorker:
    """A rollout worker that can take work: trajectories that it runs now."""

    worker_id: str
    running: int = 0


def spread_queries(
    sizes: Sequence[int], workers: Sequence[RolloutWorker], *, turn: int = 0
) -> tuple[str, ...]:
    """For each group of trajectories (by its size, in order) the worker that runs it.

    Each group goes whole to the worker with the fewest trajectories, so that engines share the
    prefix of its members. Among equals the first in an order rotated by `turn` wins, so that over
    many calls none is favoured. Raises ValueError when there is no worker.
    """
    if not workers:
        raise ValueError("no rollout worker to place queries on")
    ordered = sorted(workers, key=lambda worker: worker.worker_id)
    offset = turn % len(ordered)
    ordered = ordered[offset:] + ordered[:offset]
    heap = [(worker.running, rank) for rank, worker in enumerate(ordered)]
    heapq.heapify(heap)
    chosen = []
    for size in sizes:
        running, rank = heapq.heappop(heap)
        chosen.append(ordered[rank].worker_id)
        heapq.heappush(heap, (running + size, rank))
    return tuple(chosen)
