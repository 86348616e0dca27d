"""pass@k, maj@k and intervals against their definitions, by counting all subsets."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.algorithms.scores import (
    interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    steps_of_k,
)

VOTES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8
)


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(
    solved: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(combinations(solved, k))
    share = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(share)


def by_counting(votes: list[tuple[str | None, bool]], k: int) -> float:
    """maj@k by its definition."""
    right = {
        answer: sum(solved for one, solved in votes if one == answer)
        / sum(one == answer for one, _ in votes)
        for answer, _ in votes
    }
    subsets = list(combinations(votes, k))
    total = 0.0
    for subset in subsets:
        counts = Counter(answer for answer, _ in subset if answer is not None)
        if counts:
            top = max(counts.values())
            winners = [answer for answer, count in counts.items() if count == top]
            total += sum(right[answer] for answer in winners) / len(winners)
    return total / len(subsets)


@given(VOTES)
def test_maj_at_k_is_the_mean_over_subsets(votes: list[tuple[str | None, bool]]) -> None:
    ks = list(range(1, len(votes) + 1))
    assert majority_at_k(votes, ks) == pytest.approx([by_counting(votes, k) for k in ks])


@given(VOTES)
def test_one_vote_is_one_sample_that_answers(votes: list[tuple[str | None, bool]]) -> None:
    solved = sum(ok for answer, ok in votes if answer is not None)
    assert majority_at_k(votes, [1]) == pytest.approx([solved / len(votes)])


def test_a_majority_of_many_samples_is_a_number() -> None:
    votes = [(str(i % 7), i % 7 == 0) for i in range(1024)]
    found = majority_at_k(votes, steps_of_k(64))
    assert all(0 < one < 1 for one in found)
    assert found == sorted(found)  # the right answer is (just) the most frequent


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_an_interval_is_around_its_mean_and_never_nothing(mean: float, count: int) -> None:
    low, high = interval(mean, count)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high - low > 0


def test_intervals_are_wilsons() -> None:
    """Newcombe 1998, table I: 81 of 263, 0 of 20, 1 of 29."""
    for solved, count, expected in (
        (81, 263, (0.2553, 0.3662)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        found = interval(solved / count, count)
        assert found == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("bad", [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*bad)


def test_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert steps_of_k(1) == [1]
    assert steps_of_k(8) == [1, 2, 4, 8]
    assert steps_of_k(12) == [1, 2, 4, 8, 12]
    assert not math.isnan(pass_at_k(1024, 512, 512))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_interval_of_shares_is_wilsons_of_their_mean(values: list[float]) -> None:
    assert mean_interval(values) == interval(math.fsum(values) / len(values), len(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_interval_of_other_rewards_is_around_their_mean(values: list[float]) -> None:
    found = mean_interval([*values, 2.0])
    assert found is not None
    mean = math.fsum([*values, 2.0]) / (len(values) + 1)
    assert found[0] <= mean <= found[1]


def test_the_interval_of_rewards_is_that_of_the_normal_distribution() -> None:
    # Standard deviation 2, standard error 2 / sqrt(5).
    found = mean_interval([1.0, -1.0, 1.0, -1.0, 5.0])
    half = 1.959964 * math.sqrt(6.0) / math.sqrt(5)
    assert found == pytest.approx((1.0 - half, 1.0 + half))


@pytest.mark.parametrize("values", [[], [2.0], [0.5, math.nan], [0.5, math.inf], [1e308, -1e308]])
def test_values_without_an_interval_get_none(values: list[float]) -> None:
    assert mean_interval(values) is None
