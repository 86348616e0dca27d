"""Placement: queries over rollout workers, policies over trainer workers."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutWorker:
    """A rollout worker that can take work: trajectories that it runs now."""

    worker_id: str
    running: int = 0


@dataclass(frozen=True)
class TrainerWorker:
    """A trainer worker that can take a policy: the cost of what is bound to it already."""

    worker_id: str
    cost: float = 0.0


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


def place_policies(
    costs: Mapping[str, float],
    workers: Sequence[TrainerWorker],
    *,
    bound: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """For each policy the trainer worker that binds it.

    A policy stays where it is `bound` while that worker is among `workers`: moving costs a load of
    its state. The others go, the costliest first, to the worker with the least cost; equals are
    decided by worker id. Costs (parameters, say) are relative. Raises ValueError when there is no
    worker, or when a cost is negative.
    """
    if not workers:
        raise ValueError("no trainer worker to place policies on")
    if any(cost < 0 for cost in costs.values()):
        raise ValueError("costs must not be negative")
    load = {worker.worker_id: worker.cost for worker in workers}
    kept = {
        policy: worker_id
        for policy, worker_id in (bound or {}).items()
        if policy in costs and worker_id in load
    }
    for policy, worker_id in kept.items():
        load[worker_id] += costs[policy]
    placed = dict(kept)
    waiting = sorted(set(costs) - set(kept), key=lambda policy: (-costs[policy], policy))
    for policy in waiting:
        worker_id = min(load, key=lambda worker: (load[worker], worker))
        placed[policy] = worker_id
        load[worker_id] += costs[policy]
    return placed
