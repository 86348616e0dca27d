"""Curriculum: the choice of tasks for the queries of a step, by past success rates.

Every task is in one pool of its source: never asked, solved too rarely, within the band of success
rates that teach, or solved too often. The experience store keeps the pools, each in the order in
which its tasks were last asked; `choose_tasks` takes from their heads. It is a pure function of the
queries' numbers and of the pools, so that a restarted orchestrator chooses the same tasks again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Final


class TaskPool(StrEnum):
    """Pools of tasks; the values are the letters in ids of queries (lua/curriculum.lua)."""

    NEW = "n"
    """Never asked."""
    WITHIN = "w"
    """Success rate within the band."""
    FAILED = "f"
    """Success rate below the band."""
    SOLVED = "s"
    """Success rate above the band."""
    ASKED = "a"
    """Asked by a query whose outcome is not counted yet; chosen when all other pools are empty."""


# Where a task is taken from when its pool is empty.
_INSTEAD: Final = (TaskPool.WITHIN, TaskPool.NEW, TaskPool.FAILED, TaskPool.SOLVED)
_ID: Final = re.compile(r"q(\d+)(?:-([nwfsa])(\d+)\.(\d+))?")
# Fractions of the golden ratio and of the square root of 2, in units of 2**-64. Multiples of both
# fill the unit square evenly (Weyl 1916), so that every stretch of queries has all shares.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_ROOT: Final = 0x6A09E667F3BCC909
_ONE: Final = 1 << 64


@dataclass(frozen=True)
class TaskChoice:
    """The task of one query of a curriculum: item `item` of source `source`, from pool `pool`."""

    number: int
    pool: TaskPool
    source: int
    item: int

    @property
    def query_id(self) -> str:
        """`q17-w0.4021`: query 17 asks item 4021 of source 0, whose success rate is in the band."""
        return f"q{self.number}-{self.pool}{self.source}.{self.item}"


@dataclass(frozen=True)
class CurriculumShares:
    """Shares of a step's queries by pool; the pool within the band has the rest."""

    new: float
    failed: float
    solved: float

    def bounds(self) -> tuple[list[TaskPool], list[float]]:
        """Return the pools, and the upper bound of each one's part of [0, 1)."""
        shares = {
            TaskPool.NEW: self.new,
            TaskPool.FAILED: self.failed,
            TaskPool.SOLVED: self.solved,
        }
        return [*shares, TaskPool.WITHIN], [*accumulate(shares.values()), 1.0]


@dataclass(frozen=True)
class SourcePools:
    """The pools of one source: of each all tasks, or at least as many as are to be chosen."""

    size: int
    """Items of the source."""
    next_new: int = 0
    """Items from here on were never asked."""
    pools: Mapping[TaskPool, Sequence[int]] = field(default_factory=dict)
    """Least recently asked first. NEW has only tasks whose queries left their step before any
    trajectory had ended."""


def sources_of(numbers: Iterable[int], weights: Sequence[float], *, seed: int) -> list[int]:
    """Return the source that each query asks, in proportion to the weights."""
    total = sum(weights)
    bounds = [bound / total for bound in accumulate(weights)]
    return [_place(_fraction(number, _GOLDEN, seed), bounds) for number in numbers]


def choose_tasks(
    numbers: Sequence[int],
    sources: Sequence[SourcePools],
    *,
    weights: Sequence[float],
    shares: CurriculumShares,
    seed: int,
) -> tuple[TaskChoice, ...]:
    """Choose the tasks of the queries `numbers`, in their order.

    A pool that is empty is replaced by the next one that is not: within the band, never asked,
    below, above. A task is chosen twice only when there is no other of its source. Raises
    ValueError for a source without tasks.
    """
    pools, bounds = shares.bounds()
    heads = [_PoolHeads(source) for source in sources]
    chosen = []
    for number, source in zip(numbers, sources_of(numbers, weights, seed=seed), strict=True):
        wanted = pools[_place(_fraction(number, _ROOT, seed), bounds)]
        pool, item = heads[source].take(wanted)
        chosen.append(TaskChoice(number, pool, source, item))
    return tuple(chosen)


class _PoolHeads:
    """The pools of a source, without the tasks that were taken."""

    def __init__(self, source: SourcePools) -> None:
        if source.size < 1:
            raise ValueError("a source has no tasks")
        # A data set may have become shorter since.
        self._pools = {
            pool: deque(item for item in source.pools.get(pool, ()) if item < source.size)
            for pool in TaskPool
        }
        self._next_new, self._size = source.next_new, source.size

    def take(self, wanted: TaskPool) -> tuple[TaskPool, int]:
        """Return the first task of the pool, or of the next one that has any."""
        pool = next(one for one in (wanted, *_INSTEAD, TaskPool.ASKED) if self._has(one))
        if self._pools[pool]:
            item = self._pools[pool].popleft()
        else:
            item, self._next_new = self._next_new % self._size, self._next_new + 1
        self._pools[TaskPool.ASKED].append(item)
        return pool, item

    def _has(self, pool: TaskPool) -> bool:
        # If nothing is known of any task, one is asked again.
        new = pool is TaskPool.NEW and self._next_new < self._size
        return bool(self._pools[pool]) or new or pool is TaskPool.ASKED


def wanted_of(numbers: Sequence[int], weights: Sequence[float], *, seed: int) -> list[int]:
    """Return how many of the queries ask each source: so many tasks of each pool `choose_tasks`
    needs."""
    counts = Counter(sources_of(numbers, weights, seed=seed))
    return [counts[source] for source in range(len(weights))]


def number_of(query_id: str) -> int:
    """Return the number of a query: how many the job had taken before it. Raises ValueError."""
    return int(_parsed(query_id)[1])


def choice_of(query_id: str) -> TaskChoice | None:
    """Parse the task of a query; None for a job without a curriculum."""
    number, pool, source, item = _parsed(query_id).groups()
    if pool is None:
        return None
    return TaskChoice(int(number), TaskPool(pool), int(source), int(item))


def _parsed(query_id: str) -> re.Match[str]:
    match = _ID.fullmatch(query_id)
    if match is None:
        raise ValueError(f"query_id = {query_id} was not planned here")
    return match


def _fraction(number: int, step: int, seed: int) -> float:
    """Return a number in [0, 1): evenly distributed over any stretch of `number`."""
    return ((number + seed) * step % _ONE) / _ONE


def _place(at: float, bounds: Sequence[float]) -> int:
    # Rounding may leave the last bound below 1.
    return min(bisect_right(bounds, at), len(bounds) - 1)
