"""Quotas: never more than the interface allows, and no caller waits forever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.elastic.quota import QuotaLimits, TokenBucket

PATIENCE = 1e6


def test_a_burst_and_then_the_rate() -> None:
    bucket = TokenBucket(QuotaLimits(rate=2.0, burst=3), 0.0)
    answer = bucket.ask("a", [1] * 5, 0.0, PATIENCE)
    assert (answer.granted, answer.wait) == (3, 0.5)
    assert bucket.ask("a", [1] * 2, 0.4, PATIENCE).granted == 0
    assert bucket.ask("a", [1] * 2, 0.5, PATIENCE).granted == 1


def test_a_place_is_given_back_before_the_next_begins() -> None:
    bucket = TokenBucket(QuotaLimits(concurrency=2), 0.0)
    answer = bucket.ask("a", [1, 1, 1], 0.0, PATIENCE)
    assert (answer.granted, answer.wait) == (2, math.inf)
    bucket.give_back("a", 1, 1.0)
    assert bucket.ask("a", [1], 1.0, PATIENCE).granted == 1


def test_after_retry_after_it_starts_from_nothing() -> None:
    bucket = TokenBucket(QuotaLimits(rate=1.0, burst=4), 0.0)
    bucket.shut(10.0, 0.0)
    assert bucket.ask("a", [1], 9.9, PATIENCE).granted == 0
    answer = bucket.ask("a", [1], 10.0, PATIENCE)
    assert (answer.granted, answer.wait) == (0, 1.0)
    assert bucket.ask("a", [1], 11.0, PATIENCE).granted == 1


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    bucket = TokenBucket(QuotaLimits(rate=1.0, burst=4), 0.0)
    bucket.ask("greedy", [1] * 4, 0.0, PATIENCE)
    assert bucket.ask("patient", [4], 0.0, PATIENCE).granted == 0
    granted = [bucket.ask("greedy", [1], float(second), PATIENCE).granted for second in range(1, 4)]
    assert granted == [0, 0, 0]
    assert bucket.ask("patient", [4], 4.0, PATIENCE).granted == 1


def test_grants_of_a_dead_service_expire() -> None:
    bucket = TokenBucket(QuotaLimits(concurrency=1), 0.0)
    assert bucket.ask("dead", [1], 0.0, 2.0).granted == 1
    assert bucket.ask("next", [1], 1.0, 2.0).granted == 0
    assert bucket.ask("next", [1], 2.0, 2.0).granted == 1


def test_a_request_beyond_the_quota_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 2"):
        TokenBucket(QuotaLimits(rate=1.0, burst=8, concurrency=2), 0.0).ask("a", [3], 0.0, PATIENCE)


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.integers(1, 3), max_size=4),
        st.floats(0, 2),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS, st.floats(0.25, 8), st.integers(3, 6), st.integers(3, 6))
def test_neither_the_rate_nor_the_concurrency_is_ever_exceeded(
    steps: list[tuple[str, list[int], float, bool]], rate: float, burst: int, concurrency: int
) -> None:
    bucket = TokenBucket(QuotaLimits(rate, burst, concurrency), 0.0)
    now, taken = 0.0, [(0.0, 0)]
    held: dict[str, list[int]] = {name: [] for name in "abc"}
    for name, wishes, pause, gives_back in steps:
        now += pause
        if gives_back and held[name]:
            bucket.give_back(name, held[name].pop(), now)
        granted = bucket.ask(name, wishes, now, PATIENCE).granted
        held[name] += wishes[:granted]
        taken.append((now, sum(wishes[:granted])))
        assert bucket.in_use == sum(map(sum, held.values())) <= concurrency
        for place, (since, _) in enumerate(taken):
            assert sum(units for _, units in taken[place:]) <= rate * (now - since) + burst + 1e-6


@given(STEPS, st.floats(0.25, 8))
def test_a_waiting_request_is_granted_within_a_bound(
    steps: list[tuple[str, list[int], float, bool]], rate: float
) -> None:
    """Regardless of other requests: a waiter is served once all before it could have been."""
    bucket, now = TokenBucket(QuotaLimits(rate, 3, 0), 0.0), 0.0
    bucket.ask("greedy", [1] * 3, now, PATIENCE)
    asked = bucket.ask("patient", [3], now, PATIENCE)
    assert asked.granted == 0
    until = now + asked.wait
    for name, wishes, pause, _ in steps:
        now = min(until, now + pause)
        assert not bucket.ask(name, wishes, now, PATIENCE).granted
        bucket.ask(name, wishes, now, PATIENCE)
    assert bucket.ask("patient", [3], until + 1e-6, PATIENCE).granted == 1
