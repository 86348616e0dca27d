"""Group-relative advantages against hand-written references."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms.advantages import (
    batch_advantages,
    batch_statistics,
    group_advantages,
    group_statistics,
    leave_one_out_advantages,
    moved_baseline,
    role_advantages,
)

rewards = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
groups = st.lists(st.lists(rewards, min_size=1, max_size=9), min_size=1, max_size=6)


@settings(deadline=None)
@given(groups, st.booleans())
def test_matches_the_formula(tree: list[list[float]], scale: bool) -> None:
    flat = [(r, group) for group in tree for r in group]
    got = group_advantages([r for r, _ in flat], [g for _, g in flat], scale_by_std=scale)
    for value, (r, group) in zip(got.tolist(), flat, strict=True):
        expected = r - statistics.fmean(group)
        if scale:
            deviation = statistics.stdev(group) if len(group) > 1 else 0.0
            expected /= deviation + 1e-4
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(rewards, st.integers(1, 9))
def test_a_group_that_agrees_teaches_nothing(reward: float, size: int) -> None:
    group = [reward] * size
    assert group_advantages(group, [group] * size).tolist() == [0.0] * size
    assert group_statistics([group])[1].item() == 0.0


@settings(deadline=None)
@given(st.lists(rewards, min_size=2, max_size=9), st.floats(0.5, 3), rewards)
def test_scaled_advantages_ignore_the_rewards_unit(
    group: list[float], scale: float, shift: float
) -> None:
    _, std = group_statistics([group])
    if std < 0.1:
        return
    n = len(group)
    base = group_advantages(group, [group] * n, epsilon=0.0)
    moved = [scale * r + shift for r in group]
    torch.testing.assert_close(group_advantages(moved, [moved] * n, epsilon=0.0), base)
    assert abs(base.sum().item()) < 1e-9


def test_edges() -> None:
    assert group_advantages([], []).shape == (0,)
    assert group_advantages([float("nan")], [[float("nan"), 1.0]]).isnan().all()
    # Too large to be squared: not an advantage of zero, from which nothing would be learned.
    assert group_advantages([1e300, 0.0], [[1e300, 0.0]] * 2).isnan().all()
    with pytest.raises(ValueError, match="2 rewards but 1 groups"):
        group_advantages([1.0, 2.0], [[1.0]])
    with pytest.raises(ValueError, match="no rewards"):
        group_advantages([1.0], [[]])


@settings(deadline=None)
@given(groups)
def test_leave_one_out_is_the_mean_of_the_others(tree: list[list[float]]) -> None:
    flat = [(i, group) for group in tree for i in range(len(group))]
    got = leave_one_out_advantages([group[i] for i, group in flat], [g for _, g in flat])
    for value, (i, group) in zip(got.tolist(), flat, strict=True):
        others = group[:i] + group[i + 1 :]
        expected = group[i] - statistics.fmean(others) if others else 0.0
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.lists(rewards, min_size=1, max_size=30), st.integers(0, 99))
def test_batch_statistics_do_not_know_the_order(values: list[float], seed: int) -> None:
    mean, std = batch_statistics(values)
    assert batch_statistics(random.Random(seed).sample(values, len(values))) == (mean, std)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-9)
    n = len(values)
    found = batch_advantages(values, [mean] * n, [std] * n)
    expected = group_advantages(values, [values] * n)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(rewards, st.lists(rewards, max_size=8), st.floats(0, 0.99))
def test_a_roles_baseline_is_a_moving_average(
    before: float, values: list[float], decay: float
) -> None:
    """n updates one after another, each with the mean of the step's rewards."""
    expected = before
    for _ in values:
        expected = decay * expected + (1 - decay) * statistics.fmean(values)
    after = moved_baseline(before, values, decay)
    assert after == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert moved_baseline(before, values[::-1], decay) == after
    assert role_advantages(values, [before] * len(values)).tolist() == [v - before for v in values]


def test_rewards_that_no_advantage_can_be_made_of_are_not_zero() -> None:
    for bad in (math.nan, 1e300):
        values = [0.0, 1.0, bad]
        mean, std = batch_statistics(values)
        assert batch_advantages(values, [mean] * 3, [std] * 3).isnan().all()
    assert leave_one_out_advantages([math.nan], [[math.nan, 1.0]]).isnan().all()


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 groups or baselines"):
        role_advantages([1.0, 2.0], [0.0])
