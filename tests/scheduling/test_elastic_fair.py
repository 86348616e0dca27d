"""Fair turns, and how many workers are worth starting."""

from __future__ import annotations

from itertools import islice, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.elastic.order import FairShares, workers_to_start

costs = st.floats(0.01, 10)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 8), st.lists(costs, min_size=1, max_size=6)),
        min_size=2,
        max_size=5,
    ),
    st.integers(1, 120),
)
def test_property_shares_differ_by_no_more_than_an_action_of_each(
    jobs: list[tuple[float, list[float]]], actions: int
) -> None:
    shares = FairShares()
    queues = {}
    for i, (weight, sizes) in enumerate(jobs):
        shares.enter(f"job {i}", weight)
        queues[f"job {i}"] = sizes
    given_to = dict.fromkeys(queues, 0.0)
    begun = dict.fromkeys(queues, 0)
    for _ in range(actions):
        waiting = {
            job: iter([(job, sizes[begun[job] % len(sizes)])]) for job, sizes in queues.items()
        }
        job, cost = next(shares.merge(waiting, lambda item: item[1]))
        shares.charge(job, cost)
        begun[job] += 1
        given_to[job] += cost / jobs[int(job.split()[1])][0]
    largest = {f"job {i}": max(sizes) / weight for i, (weight, sizes) in enumerate(jobs)}
    for one in queues:
        for other in queues:
            bound = largest[one] + largest[other]
            assert given_to[one] - given_to[other] <= bound + 1e-6


@given(st.integers(2, 6), st.integers(1, 200), st.data())
def test_property_nobody_starves_whatever_others_ask_for(
    others: int, backlog: int, data: st.DataObject
) -> None:
    shares = FairShares()
    for i in range(others):
        shares.enter(f"greedy {i}")
        shares.charge(f"greedy {i}", data.draw(costs))
    shares.enter("late")
    queues = {f"greedy {i}": repeat(("greedy", 1.0), backlog) for i in range(others)}
    queues["late"] = repeat(("late", 1.0), 1)
    order = [kind for kind, _ in islice(shares.merge(queues, lambda item: item[1]), others * 11)]
    # Jobs without any share so far come before others, except for running actions.
    assert "late" in order[: others + 1]


def test_a_job_gains_no_claim_while_it_is_away() -> None:
    shares = FairShares()
    shares.enter("away")
    shares.enter("busy")
    for _ in range(100):
        shares.charge("busy", 1.0)
    shares.enter("away")
    order = shares.merge({"away": repeat("away", 50), "busy": repeat("busy", 50)}, lambda _: 1.0)
    assert "busy" in list(islice(order, 3))


def test_a_job_pays_for_time_beyond_the_expected() -> None:
    shares = FairShares()
    for job in ("a", "b"):
        shares.enter(job)
        shares.charge(job, 1.0)
    shares.correct("a", 9.0)
    order = shares.merge({"a": repeat("a", 20), "b": repeat("b", 20)}, lambda _: 1.0)
    assert list(islice(order, 8)) == ["b"] * 8


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        FairShares().enter("job", weight)


@given(
    st.floats(0, 1e4), st.floats(0, 100), st.integers(0, 64), st.integers(0, 64), st.floats(0, 10)
)
def test_property_workers_are_started_within_bounds_and_nobody_waits_for_ever(
    backlog: float, waited: float, alive: int, startable: int, cold: float
) -> None:
    started = workers_to_start(backlog, waited, alive, startable, cold)
    assert 0 <= started <= startable
    if startable and (alive == 0 or waited >= cold):
        assert started >= 1
    # More work is never a reason to start fewer.
    assert workers_to_start(backlog * 2, waited, alive, startable, cold) >= started


def test_workers_start_for_long_work_only() -> None:
    assert workers_to_start(0.05, 0.0, alive=1, startable=7, cold_seconds=0.2) == 0
    assert workers_to_start(0.7, 0.0, alive=1, startable=7, cold_seconds=0.2) == 2
    assert workers_to_start(100.0, 0.0, alive=1, startable=7, cold_seconds=0.2) == 7
