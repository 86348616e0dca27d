"""Admission: the queries of a step, and when a step, a query and a trajectory may start.

`holding_back` decides from the committed weight versions when a step may open; `too_old` decides
whether a carried query still obeys the staleness bound. All functions are pure, so a restarted
orchestrator and the simulator plan the same step.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from troupe.scheduling.curriculum import TaskChoice, choice_of, number_of


@dataclass(frozen=True)
class RolloutWorker:
    """A rollout worker that accepts work. `running`: trajectories that it runs now. `share`: its
    part of all trajectories, relative to the others' (`troupe.scheduling.sharing`)."""

    worker_id: str
    running: int = 0
    share: float = 1.0


def spread_queries(
    sizes: Sequence[int], workers: Sequence[RolloutWorker], *, turn: int = 0
) -> tuple[str, ...]:
    """Return the worker of each group of trajectories, given the groups' sizes in order.

    A whole group goes to the worker with the fewest trajectories for its share, because its members
    share a cached prompt. Ties are broken in an order rotated by `turn`, so that no worker is
    favoured over many calls. Raises ValueError without workers.
    """
    if not workers:
        raise ValueError("no rollout worker to place queries on")
    ordered = sorted(workers, key=lambda worker: worker.worker_id)
    offset = turn % len(ordered)
    ordered = ordered[offset:] + ordered[:offset]
    heap = [(worker.running / worker.share, rank) for rank, worker in enumerate(ordered)]
    heapq.heapify(heap)
    chosen = []
    for size in sizes:
        filled, rank = heapq.heappop(heap)
        chosen.append(ordered[rank].worker_id)
        heapq.heappush(heap, (filled + size / ordered[rank].share, rank))
    return tuple(chosen)


@dataclass(frozen=True)
class QueryProgress:
    """Progress of one query of a step. `complete`: its group is complete. `settled`: all its
    trajectories have ended and none of its rows waits for a column. `kept`: rows that were not
    dropped."""

    query_id: str
    complete: bool
    settled: bool
    kept: int


@dataclass(frozen=True)
class RosterMove:
    """A change of a step's roster: `add` fresh queries, remove those in `leave`; with `close` the
    roster is final."""

    add: int = 0
    leave: tuple[str, ...] = ()
    close: bool = False


def next_move(
    queries: Sequence[QueryProgress],
    *,
    wanted: int,
    spare: int,
    max_refills: int,
    may_close: bool = True,
    first_k: bool = False,
) -> RosterMove:
    """Return the next change of a roster that now holds `queries`.

    The step wants `wanted` queries and runs `spare` more. With `first_k` it closes as soon as
    `wanted` are there, and the others leave. A query that is settled without a row is replaced by a
    fresh one, at most `max_refills` times; with 0 it counts like any other.
    """
    replaced = [q for q in queries if q.settled and not q.kept] if max_refills else []
    refills = min(len(replaced), max_refills)
    add = max(0, wanted + spare + refills - len(queries))
    if not may_close:
        return RosterMove(add=add)
    if first_k:
        there = sum(q.settled if max_refills else q.complete for q in queries) - len(replaced)
        if there >= wanted:
            return RosterMove(
                leave=tuple(q.query_id for q in queries if not q.complete), close=True
            )
    if add:
        return RosterMove(add=add)
    exhausted = max_refills > 0 and not first_k and refills == max_refills
    over = all(q.settled if max_refills else q.complete for q in queries)
    return RosterMove(close=over or exhausted)


# Trajectory seeds are int64 on the wire and must not be negative.
_SEED_BITS: Final = 63


@dataclass(frozen=True)
class QueryPlan:
    """One query with its trajectories. `index` counts endlessly over the split; the loader of the
    tasks takes it modulo their number. `choice`: its task from a curriculum, instead of `index`."""

    query_id: str
    index: int
    trajectory_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    choice: TaskChoice | None = None


def plan_queries(
    query_ids: Iterable[str], *, job_seed: int, group_size: int, step: int | None
) -> tuple[QueryPlan, ...]:
    """Return the queries of the training split with these ids (`query_id_of`,
    `TaskChoice.query_id`).

    `step` is the step that they belong to; None if they may be carried from step to step: then the
    trajectory ids do not contain it. Raises ValueError for another id.
    """
    _require(group_size >= 1, "group_size", group_size)
    _require(step is None or step >= 0, "step", step or 0)
    suffix = "" if step is None else f"-s{step}"
    return tuple(
        QueryPlan(
            query_id=query_id,
            index=(index := number_of(query_id)),
            trajectory_ids=tuple(f"{query_id}{suffix}-t{n}" for n in range(group_size)),
            seeds=tuple(seed_of(job_seed, "train", index, n) for n in range(group_size)),
            choice=choice_of(query_id),
        )
        for query_id in query_ids
    )


def query_id_of(index: int) -> str:
    """Return the id of query `index` of a job without a curriculum."""
    return f"q{index}"


def plan_evaluation(
    *, job_seed: int, step: int, queries: int, samples: int = 1, name: str = ""
) -> tuple[QueryPlan, ...]:
    """Return the first `queries` of the held-out split of evaluation `name`, `samples` trajectories
    each.

    Queries and seeds are equal at every step, so that evaluations are comparable. Trajectory ids
    differ, so that each evaluation can be inspected.
    """
    _require(step >= 0, "step", step)
    _require(queries >= 0, "queries", queries)
    _require(samples >= 1, "samples", samples)
    prefix, split = (f"{name}-h", f"held_out/{name}") if name else ("h", "held_out")
    return tuple(
        QueryPlan(
            query_id=f"{prefix}{index}",
            index=index,
            trajectory_ids=tuple(f"{prefix}{index}-e{step}-t{n}" for n in range(samples)),
            seeds=tuple(seed_of(job_seed, split, index, n) for n in range(samples)),
        )
        for index in range(queries)
    )


# Queries of each evaluation whose first trajectory is kept, to be compared over steps.
COMPARED: Final = 4
# Trajectories of a query, and queries of an evaluation, whose tokens are kept.
_TOKEN_TRAJECTORIES: Final = 8
_TOKEN_QUERIES: Final = 4
_TRAJECTORY_ID: Final = re.compile(
    r"(?:q(\d+)(?:-[a-z]\d+\.\d+)?(?:-s\d+)?|(?:.+-)?h(\d+)-e\d+)-t(\d+)"
)


def keeps_tokens(trajectory_id: str, queries_per_step: int) -> bool:
    """Return whether the tokens of a trajectory are kept for people to look at.

    In training this keeps one query in `queries_per_step`, about one a step; in an evaluation the
    first queries. Both keep the first trajectories. Rollout, trainer and orchestrator decide alike
    without communication. Keeps no tokens of trajectories planned elsewhere (matches).
    """
    found = _TRAJECTORY_ID.fullmatch(trajectory_id)
    if found is None or int(found[3]) >= _TOKEN_TRAJECTORIES:
        return False
    if found[1] is not None:
        return int(found[1]) % queries_per_step == 0
    return int(found[2]) < _TOKEN_QUERIES


def keeps_text(trajectory_id: str, *, wanted: int, of: int, samples: int) -> bool:
    """Return whether the texts of a trajectory are kept for people to read.

    In training and matches this keeps a share `wanted / of` drawn by the hash of the id, whatever
    the outcome. In an evaluation with `samples` trajectories per query it keeps the first `wanted`
    ones, which have the same queries each time. Trajectories for comparing evaluations are always
    kept.
    """
    found = _TRAJECTORY_ID.fullmatch(trajectory_id)
    if found is not None and found[2] is not None:
        query, sample = int(found[2]), int(found[3])
        return query * samples + sample < wanted or (query < COMPARED and sample == 0)
    digest = hashlib.blake2b(trajectory_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") * of < wanted << 64


def seed_of(job_seed: int, split: str, index: int, trajectory: int) -> int:
    """Return the seed of one trajectory, in [0, 2**63): distinct per (job, split, query,
    trajectory)."""
    text = f"{job_seed}/{split}/{index}/{trajectory}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (1 << _SEED_BITS)


def holding_back(
    step: int, committed: Mapping[str, int], alpha: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the policies whose commits are missing before step `step` may open, sorted.

    `committed`: by trained policy the number of steps that are committed and whose weights the
    engines serve; `alpha`: its staleness bound (missing: 0, the on-policy modes). A trajectory of
    step s then starts with a version of at least s - alpha steps, and step s trains it.
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
    """Return whether a query's trajectories may be more than `alpha` versions old when step `step`
    trains them.

    `started`: the version that each policy began with; policies without a turn are missing.
    `versions` are those after the `committed` steps; every step in between may raise a version by
    one.
    """
    return any(
        versions[policy] + max(0, step - committed[policy]) - version > alpha.get(policy, 0)
        for policy, version in started.items()
        if policy in versions
    )


def groups_that_fit(sizes: Sequence[int], *, in_flight: int, limit: int) -> int:
    """Return how many of the waiting groups of trajectories, in order, may start now.

    `sizes`: trajectories per waiting group; `limit` bounds those in flight. A group starts as a
    whole, because its members share a cached prompt. A group larger than `limit` starts alone:
    otherwise it would never start.
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


# Another wave starts when a quarter of the window is free: one call per wave instead of per
# trajectory.
_WAVE_FRACTION: Final = 0.25


def due_wave(sizes: Sequence[int], *, in_flight: int, limit: int) -> int:
    """Return how many of the waiting groups of trajectories start now: `groups_that_fit`, unless
    a larger wave is worth waiting for."""
    count = groups_that_fit(sizes, in_flight=in_flight, limit=limit)
    if count < len(sizes) and in_flight > (1 - _WAVE_FRACTION) * limit:
        return 0
    return count


def too_many_failed(failed: int, total: int, max_fraction: float) -> bool:
    """Return whether more than `max_fraction` of a step's `total` trajectories have failed."""
    return failed > max_fraction * total


def _require(good: bool, name: str, value: int) -> None:
    if not good:
        raise ValueError(f"{name} = {value} is out of range")
