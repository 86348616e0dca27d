from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.admission import RolloutWorker, spread_queries

worker_ids = st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)


@given(st.lists(st.integers(1, 8), max_size=40), worker_ids, st.integers(0, 100))
def test_queries_are_spread_evenly(sizes: list[int], ids: list[str], turn: int) -> None:
    chosen = spread_queries(sizes, [RolloutWorker(i) for i in ids], turn=turn)
    assert len(chosen) == len(sizes)
    load: Counter[str] = Counter(dict.fromkeys(ids, 0))
    for size, worker in zip(sizes, chosen, strict=True):
        load[worker] += size
    assert set(load) == set(ids)
    assert max(load.values()) - min(load.values()) <= max(sizes, default=0)


@given(st.lists(st.integers(1, 8), max_size=40), st.permutations("abcd"), st.integers(0, 9))
def test_the_order_of_workers_does_not_matter(sizes: list[int], ids: list[str], turn: int) -> None:
    workers = [RolloutWorker(i, running=ord(i) % 3) for i in ids]
    expected = spread_queries(sizes, sorted(workers, key=lambda w: w.worker_id), turn=turn)
    assert spread_queries(sizes, workers, turn=turn) == expected


def test_a_busy_worker_gets_less() -> None:
    workers = [RolloutWorker("a", running=100), RolloutWorker("b")]
    assert spread_queries([8] * 5, workers) == ("b",) * 5


def test_equals_take_turns() -> None:
    workers = [RolloutWorker("a"), RolloutWorker("b")]
    assert {spread_queries([1], workers, turn=turn)[0] for turn in (0, 1)} == {"a", "b"}


def test_spreading_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="no rollout worker"):
        spread_queries([1], [])
