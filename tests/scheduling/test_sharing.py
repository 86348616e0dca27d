"""How rollout workers share a job's window and its attached servers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.admission import RolloutWorker, spread_queries
from troupe.scheduling.sharing import (
    LEAST_SHARE,
    MOST_SHARE,
    WINDOW_ENDS,
    CapacityShares,
    keepers,
    split_limit,
)

WORKERS = st.sets(st.sampled_from("abcdef"), min_size=1)


def settled(speeds: dict[str, float], window: int, rounds: int = 40) -> dict[str, int]:
    """Return trajectories in flight per worker after this number of rounds, if each worker advances
    `speeds` trajectories per second in total, but none faster than in one second."""
    shares, rng = CapacityShares(), random.Random(3)
    for turn in range(rounds):
        chosen = Counter(
            spread_queries(
                [1] * window,
                [RolloutWorker(one, 0, shares.share(one)) for one in speeds],
                turn=turn,
            )
        )
        for one, speed in speeds.items():
            for _ in range(max(WINDOW_ENDS, chosen[one])):
                shares.ended(one, max(1.0, chosen[one] / speed) * rng.uniform(0.8, 1.25))
    return dict(chosen)


def test_a_worker_that_is_three_times_as_fast_gets_three_times_as_many() -> None:
    found = settled({"fast": 30.0, "slow": 10.0}, window=400)
    assert found["fast"] / found["slow"] == pytest.approx(3, rel=0.2)


def test_workers_that_are_not_full_keep_equal_shares() -> None:
    found = settled({"one": 1000.0, "other": 800.0, "third": 900.0}, window=300)
    assert max(found.values()) < 1.3 * min(found.values())


def test_a_worker_alone_or_new_has_the_average_share() -> None:
    shares = CapacityShares()
    for _ in range(100):
        shares.ended("alone", 5.0)
    assert shares.share("alone") == shares.share("new") == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6)), max_size=300))
def test_no_worker_is_starved(ends: list[tuple[str, float]]) -> None:
    shares = CapacityShares()
    for worker, seconds in ends:
        shares.ended(worker, seconds)
    for worker in "abc":
        assert LEAST_SHARE <= shares.share(worker) <= MOST_SHARE
    shares.forget("a")
    assert shares.share("a") == 1


@given(st.integers(0, 30), WORKERS, WORKERS)
def test_every_server_has_one_keeper_and_keeps_it(
    count: int, before: set[str], after: set[str]
) -> None:
    servers = [("policy", number) for number in range(count)]
    former = keepers(servers, before, {})
    assert list(former) == servers
    loads = Counter(dict.fromkeys(before, 0))
    loads.update(former.values())
    assert max(loads.values()) - min(loads.values()) <= 1
    now = keepers(servers, after, former)
    assert list(now) == servers
    assert set(now.values()) <= after
    for server, worker in former.items():
        assert worker not in after or now[server] == worker


def test_without_workers_nobody_keeps_anything() -> None:
    assert keepers(["one"], [], {"one": "gone"}) == {}


@given(
    st.integers(1, 4096),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(LEAST_SHARE, MOST_SHARE), min_size=1),
)
def test_a_limit_is_split_whole_and_everybody_has_a_place(
    limit: int, shares: dict[str, float]
) -> None:
    found = split_limit(limit, shares)
    assert found.keys() == shares.keys()
    assert min(found.values()) >= 1
    assert sum(found.values()) >= limit
    assert sum(found.values()) <= max(limit, limit + len(shares) - 1)
    for worker, turns in found.items():
        exact = limit * shares[worker] / sum(shares.values())
        assert turns == 1 or abs(turns - exact) < 1
