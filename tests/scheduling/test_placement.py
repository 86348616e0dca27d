from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.placement import (
    RolloutWorker,
    TrainerWorker,
    place_policies,
    spread_queries,
)

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


costs = st.dictionaries(st.sampled_from("pqrstu"), st.floats(0, 100), max_size=6)


@given(costs, worker_ids, st.dictionaries(st.sampled_from("pqrstu"), st.sampled_from("abcxyz")))
def test_policies_stay_and_the_rest_is_balanced(
    costs: dict[str, float], ids: list[str], bound: dict[str, str]
) -> None:
    placed = place_policies(costs, [TrainerWorker(i) for i in ids], bound=bound)
    assert set(placed) == set(costs)
    assert set(placed.values()) <= set(ids)
    for policy in costs:
        if bound.get(policy) in ids:
            assert placed[policy] == bound[policy]
    if not any(worker in ids for worker in bound.values()):
        load = dict.fromkeys(ids, 0.0)
        for policy, worker in placed.items():
            load[worker] += costs[policy]
        spread = max(load.values()) - min(load.values())
        assert spread <= max(costs.values(), default=0.0) + 1e-9


def test_two_policies_take_two_workers() -> None:
    placed = place_policies({"a": 3.0, "b": 1.0}, [TrainerWorker("t1"), TrainerWorker("t2")])
    assert placed == {"a": "t1", "b": "t2"}


def test_without_workers_there_is_no_placement() -> None:
    with pytest.raises(ValueError, match="no trainer worker"):
        place_policies({"a": 1.0}, [])
    with pytest.raises(ValueError, match="no rollout worker"):
        spread_queries([1], [])
