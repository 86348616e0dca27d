"""The choice of tasks by difficulty, against a plain model of the store's pools."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.scheduling.curriculum import (
    CurriculumShares,
    SourcePools,
    TaskChoice,
    TaskPool,
    choice_of,
    choose_tasks,
    number_of,
    sources_of,
    wanted_of,
)

SHARES = CurriculumShares(new=0.25, failed=0.1, solved=0.05)
BAND = (0.1, 0.9)


class Pools:
    """The pools as the store keeps them: a query takes its task out, its outcome puts it back."""

    def __init__(self, sizes: list[int], rates: list[list[float]]) -> None:
        self.sizes, self.rates = sizes, rates
        self.next_new = [0 for _ in sizes]
        self.pools: list[dict[TaskPool, list[int]]] = [
            {pool: [] for pool in TaskPool} for _ in sizes
        ]
        self.asked: list[TaskChoice] = []

    def choose(
        self, numbers: range, weights: list[float], shares: CurriculumShares, seed: int = 0
    ) -> tuple[TaskChoice, ...]:
        wanted = wanted_of(numbers, weights, seed=seed)
        listed = [
            SourcePools(size, new, {pool: items[:most] for pool, items in pools.items()})
            for size, new, pools, most in zip(
                self.sizes, self.next_new, self.pools, wanted, strict=True
            )
        ]
        chosen = choose_tasks(numbers, listed, weights=weights, shares=shares, seed=seed)
        for one in chosen:
            self._move(one.source, one.item, TaskPool.ASKED)
            self.next_new[one.source] = max(self.next_new[one.source], one.item + 1)
        self.asked += chosen
        return chosen

    def count(self) -> None:
        """The step is over: its tasks go to the pools of their success rates."""
        for one in self.asked:
            rate = self.rates[one.source][one.item]
            pool = TaskPool.WITHIN
            if not BAND[0] <= rate <= BAND[1]:
                pool = TaskPool.FAILED if rate < BAND[0] else TaskPool.SOLVED
            self._move(one.source, one.item, pool)
        self.asked = []

    def _move(self, source: int, item: int, pool: TaskPool) -> None:
        for items in self.pools[source].values():
            if item in items:
                items.remove(item)
        self.pools[source][pool].append(item)


@st.composite
def sources(draw: st.DrawFn) -> Pools:
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    rate = st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.9, 0.95, 1.0])
    rates = [draw(st.lists(rate, min_size=size, max_size=size)) for size in sizes]
    return Pools(sizes, rates)


@settings(deadline=None)
@given(sources(), st.integers(1, 40), st.data())
def test_every_task_is_asked_and_known_pools_are_respected(
    pools: Pools, queries: int, data: st.DataObject
) -> None:
    """For all rates, also if no task is in the band: every query gets a task, each task is asked
    and asked again, and a pool is left out only when it is empty."""
    weight = st.sampled_from([0.5, 1.0, 3.0])
    weights = [data.draw(weight) for _ in pools.sizes]
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    asked: Counter[tuple[int, int]] = Counter()
    total, first = sum(pools.sizes), 0
    for _ in range(-(-400 * total // queries)):
        numbers = range(first, first + queries)
        there = [{pool: list(items) for pool, items in one.items()} for one in pools.pools]
        chosen = pools.choose(numbers, weights, SHARES, seed)
        assert [one.number for one in chosen] == list(numbers)
        for one in chosen:
            assert 0 <= one.item < pools.sizes[one.source]
            if one.pool in (TaskPool.WITHIN, TaskPool.FAILED, TaskPool.SOLVED):
                assert one.item in there[one.source][one.pool]
            # A source's task is chosen twice only after all others.
            if one.pool is TaskPool.ASKED:
                of = {two.item for two in chosen if two.source == one.source}
                assert len(of) == pools.sizes[one.source]
        asked.update((one.source, one.item) for one in chosen)
        first += queries
        pools.count()
        if len(asked) == total and min(asked.values()) >= 2:
            return
    raise AssertionError(f"never asked twice: {total - sum(n >= 2 for n in asked.values())}")


@settings(deadline=None)
@given(sources(), st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_queries_that_join_are_those_that_would_have_been_there(
    pools: Pools, sizes: list[int]
) -> None:
    """A step that takes its queries at once has the same ones as one that takes them one by one, as
    long as no task has to be asked twice."""
    weights = [1.0 for _ in pools.sizes]
    for start in range(0, 20, 10):
        pools.choose(range(start, start + 10), weights, SHARES)
        pools.count()
    other = Pools(pools.sizes, pools.rates)
    other.next_new = list(pools.next_new)
    other.pools = [{pool: list(items) for pool, items in one.items()} for one in pools.pools]
    together = pools.choose(range(20, 20 + sum(sizes)), weights, SHARES)
    apart, first = [], 20
    for size in sizes:
        apart += other.choose(range(first, first + size), weights, SHARES)
        first += size
    if all(one.pool is not TaskPool.ASKED for one in together):
        assert tuple(apart) == together


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 10**9),
)
def test_weights_hold_over_every_stretch(weights: list[float], seed: int, first: int) -> None:
    counts = Counter(sources_of(range(first, first + 1000), weights, seed=seed))
    for source, weight in enumerate(weights):
        assert abs(counts[source] - 1000 * weight / sum(weights)) < 12


@pytest.mark.parametrize("first", [0, 12_345])
def test_shares_hold_within_each_source(first: int) -> None:
    """With plenty in every pool the pools have the job's shares, in each source."""
    plenty = range(10_000)
    one = SourcePools(100_000, 50_000, dict.fromkeys(TaskPool, plenty))
    numbers = range(first, first + 2000)
    chosen = choose_tasks(numbers, [one, one], weights=[3.0, 1.0], shares=SHARES, seed=7)
    for source, share in ((0, 0.75), (1, 0.25)):
        of = Counter(choice.pool for choice in chosen if choice.source == source)
        assert of.total() == pytest.approx(2000 * share, abs=10)
        for pool, part in (("n", 0.25), ("f", 0.1), ("s", 0.05), ("w", 0.6)):
            assert of[TaskPool(pool)] / of.total() == pytest.approx(part, abs=0.03)


def test_without_known_tasks_all_are_new_and_later_ones_are_replaced() -> None:
    empty = SourcePools(1000)
    chosen = choose_tasks(range(8), [empty], weights=[1.0], shares=SHARES, seed=0)
    assert [(one.pool, one.item) for one in chosen] == [(TaskPool.NEW, n) for n in range(8)]
    # Everything was asked, nothing is in the band: those that fail come first, the rest after.
    pools = {TaskPool.FAILED: [4, 2], TaskPool.SOLVED: [1, 3, 0]}
    known = SourcePools(5, 5, pools)
    chosen = choose_tasks(range(5), [known], weights=[1.0], shares=SHARES, seed=0)
    assert {one.item for one in chosen} == set(range(5))
    assert [one.item for one in chosen if one.pool is TaskPool.FAILED] == [4, 2]
    # The data set has become shorter: removed rows are not asked.
    short = SourcePools(2, 5, pools)
    chosen = choose_tasks(range(9), [short], weights=[1.0], shares=SHARES, seed=0)
    assert {one.item for one in chosen} <= {0, 1}
    with pytest.raises(ValueError, match="no tasks"):
        choose_tasks(range(1), [SourcePools(0)], weights=[1.0], shares=SHARES, seed=0)


@given(
    st.integers(0, 10**12), st.sampled_from(TaskPool), st.integers(0, 255), st.integers(0, 10**9)
)
def test_an_id_of_a_query_encodes_its_task(
    number: int, pool: TaskPool, source: int, item: int
) -> None:
    choice = TaskChoice(number, pool, source, item)
    assert choice_of(choice.query_id) == choice
    assert number_of(choice.query_id) == number
    assert choice_of(f"q{number}") is None
