"""The limit compared with engines whose optimum is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.routing import LEAST_CONCURRENCY_GAIN, AdaptiveLimit


def drive(
    limit: AdaptiveLimit, token_seconds: Callable[[float], float], turns: int, seed: int = 0
) -> list[int]:
    """A loaded engine: turns leave one by one and are replaced up to the limit."""
    rng = random.Random(seed)
    in_flight, seen = 1, []
    for _ in range(turns):
        while in_flight < limit.now:
            in_flight += 1
            if rng.random() < 0.2:
                break
        tokens = max(1, round(rng.lognormvariate(4, 0.8)))
        noise = rng.uniform(0.9, 1.1)
        limit.ended(in_flight, tokens * token_seconds(in_flight) * noise, tokens)
        in_flight = min(in_flight, limit.now)
        seen.append(limit.now)
    return seen


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(-1, 1e6), st.integers(-1, 10_000)), max_size=300
    ),
    st.integers(1, 64),
)
def test_the_limit_stays_within_bounds(turns: list[tuple[float, float, int]], most: int) -> None:
    limit = AdaptiveLimit(most)
    for turn in turns:
        limit.ended(*turn)
        assert 1 <= limit.now <= most


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_that_gains_from_every_turn_gets_all(seed: int) -> None:
    seen = drive(AdaptiveLimit(64), lambda n: 0.02 + 0.0001 * n, 4000, seed)
    assert seen[-1] == 64
    assert sum(seen) / len(seen) > 60


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_settles_where_throughput_hardly_grows(seed: int) -> None:
    base, slope = 0.02, 0.01
    best = base * (1 - LEAST_CONCURRENCY_GAIN) / (slope * LEAST_CONCURRENCY_GAIN)  # 65
    seen = drive(AdaptiveLimit(128), lambda n: base + slope * n, 8000, seed)
    settled = seen[len(seen) // 2 :]
    mean = sum(settled) / len(settled)
    assert 0.5 * best <= mean <= 2 * best
    # It loses little: throughput there compared with the full 128.
    assert (mean / (base + slope * mean)) / (128 / (base + slope * 128)) > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_leaves_the_range_where_the_engine_thrashes(seed: int) -> None:
    seen = drive(AdaptiveLimit(64), lambda n: 0.02 if n <= 16 else 0.02 * (n / 16) ** 2, 6000, seed)
    settled = seen[len(seen) // 2 :]
    assert 8 <= sum(settled) / len(settled) <= 26


def test_the_limit_rises_when_the_engine_recovers() -> None:
    limit = AdaptiveLimit(64)
    drive(limit, lambda n: 0.02 * (n / 8) ** 2, 3000)
    assert limit.now < 32
    drive(limit, lambda n: 0.02, 6000)
    assert limit.now > 48


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="most = 0"):
        AdaptiveLimit(0)
