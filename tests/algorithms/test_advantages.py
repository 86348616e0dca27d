"""Group-relative advantages against hand-written references."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms import group_advantages, group_statistics

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
