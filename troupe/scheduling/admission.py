"""Admission: which queries a step consists of, and when a step and a trajectory may start.

Everything here is a function of its arguments, so that a restarted orchestrator plans the very
same step, and the simulator the same as both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# Trajectory seeds are int64 on the wire and must not be negative.
_SEED_BITS: Final = 63


@dataclass(frozen=True)
class QueryPlan:
    """One query and the trajectories to run on it. `index` counts over the split without end:
    who loads the tasks takes it modulo their number."""

    query_id: str
    index: int
    trajectory_ids: tuple[str, ...]
    seeds: tuple[int, ...]


def plan_queries(
    indexes: Iterable[int], *, job_seed: int, group_size: int, step: int | None
) -> tuple[QueryPlan, ...]:
    """The queries at `indexes` of the training split, counted without end.

    `step` is the one that they belong to; None where they may be carried from step to step: then
    their trajectories are not named after one.
    """
    _require(group_size >= 1, "group_size", group_size)
    _require(step is None or step >= 0, "step", step or 0)
    home = "" if step is None else f"-s{step}"
    return tuple(
        QueryPlan(
            query_id=f"q{index}",
            index=index,
            trajectory_ids=tuple(f"q{index}{home}-t{n}" for n in range(group_size)),
            seeds=tuple(seed_of(job_seed, "train", index, n) for n in range(group_size)),
        )
        for index in indexes
    )


def index_of(query_id: str) -> int:
    """Which item of the training split a query of `plan_queries` is."""
    if not (query_id.startswith("q") and query_id[1:].isdecimal()):
        raise ValueError(f"query_id = {query_id} was not planned here")
    return int(query_id[1:])


def plan_evaluation(*, job_seed: int, step: int, queries: int) -> tuple[QueryPlan, ...]:
    """The first `queries` of the held-out split, one trajectory each.

    Queries and seeds are the same at every step, so that evaluations compare; the trajectory ids
    are not, so that each evaluation can be looked at.
    """
    _require(step >= 0, "step", step)
    _require(queries >= 0, "queries", queries)
    return tuple(
        QueryPlan(
            query_id=f"h{index}",
            index=index,
            trajectory_ids=(f"h{index}-e{step}-t0",),
            seeds=(seed_of(job_seed, "held_out", index, 0),),
        )
        for index in range(queries)
    )


def seed_of(job_seed: int, split: str, index: int, trajectory: int) -> int:
    """The seed of one trajectory, in [0, 2**63): distinct per (job, split, query, trajectory)."""
    text = f"{job_seed}/{split}/{index}/{trajectory}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (1 << _SEED_BITS)


def holding_back(
    step: int, committed: Mapping[str, int], alpha: Mapping[str, int]
) -> tuple[str, ...]:
    """The policies whose commits are missing before step `step` may open, sorted.

    `committed` says of each trained policy how many of its steps are committed and served by the
    engines, `alpha` its staleness bound (0 where none is named: the on-policy modes). A trajectory
    of step s then starts with a version of at least s - alpha steps, and is trained by one of s.
    """
    for policy, bound in alpha.items():
        _require(bound >= 0, f"alpha of {policy}", bound)
    return tuple(
        sorted(policy for policy, done in committed.items() if step - done > alpha.get(policy, 0))
    )


def too_old(
    started: Mapping[str, int],
    step: int,
    *,
    committed: Mapping[str, int],
    versions: Mapping[str, int],
    alpha: Mapping[str, int],
) -> bool:
    """Whether what a query's trajectories `started` with (policy -> version) may be more than
    `alpha` versions old when step `step` is trained.

    `versions` are those after the steps that are `committed`; every step in between may raise them
    by one. A policy that has not spoken yet is no hindrance.
    """
    return any(
        versions[policy] + max(0, step - committed[policy]) - version > alpha.get(policy, 0)
        for policy, version in started.items()
        if policy in versions
    )


def next_wave(sizes: Sequence[int], *, in_flight: int, limit: int) -> int:
    """How many of the waiting groups of trajectories, first come first served, may start now.

    `sizes` are the trajectories per waiting group, `limit` bounds those in flight. A group starts
    as a whole: its members share a prompt that engines cache. A group larger than `limit` starts
    alone, since otherwise it never would.
    """
    _require(in_flight >= 0, "in_flight", in_flight)
    _require(limit >= 1, "limit", limit)
    room = limit - in_flight
    count = 0
    for size in sizes:
        if size > room and not (in_flight == 0 and count == 0):
            break
        room -= size
        count += 1
    return count


def too_many_failed(failed: int, total: int, max_fraction: float) -> bool:
    """Whether more than `max_fraction` of a step's `total` trajectories have failed."""
    return failed > max_fraction * total


def _require(good: bool, name: str, value: int) -> None:
    if not good:
        raise ValueError(f"{name} = {value} is out of range")
