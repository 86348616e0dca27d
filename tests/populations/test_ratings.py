"""Ratings of members, by the matches that they played."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.populations.payoffs import Rating, rated

MATCHES = st.lists(
    st.tuples(
        st.permutations(["a", "b", "c"]),
        st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=3, max_size=3),
    ),
    max_size=8,
)


def test_winners_rise_and_everybody_is_known_better() -> None:
    after = rated({}, ["a", "b"], [1.0, -1.0])
    assert after["a"].mean > Rating().mean > after["b"].mean
    assert all(one.deviation < Rating().deviation and one.matches == 1 for one in after.values())


def test_a_draw_of_equals_leaves_both_ratings_equal() -> None:
    after = rated({}, ["a", "b"], [0.5, 0.5])
    assert after["a"].mean == pytest.approx(after["b"].mean)


def test_a_member_against_itself_says_nothing() -> None:
    assert rated({}, ["a", "a"], [1.0, -1.0]) == {}
    assert rated({}, ["a"], [1.0]) == {}


def test_somebody_on_two_seats_is_one_player() -> None:
    after = rated({}, ["new", "old", "new"], [-1.0, -0.5, 1.5])
    assert after == rated({}, ["new", "old"], [0.25, -0.5])
    assert after["new"].mean > after["old"].mean


@given(MATCHES)
def test_the_same_matches_give_the_same_bits(matches: list[tuple[list[str], list[float]]]) -> None:
    def play() -> dict[str, Rating]:
        ratings: dict[str, Rating] = {}
        for members, payoffs in matches:
            ratings |= rated(ratings, members, payoffs)
        return ratings

    assert play() == play()
    assert all(one.matches == len(matches) for one in play().values())


def test_a_player_that_wins_more_is_rated_higher() -> None:
    ratings: dict[str, Rating] = {}
    for number in range(30):
        ratings |= rated(ratings, ["strong", "weak"], [1.0, -1.0] if number % 5 else [-1.0, 1.0])
    assert ratings["strong"].mean > ratings["weak"].mean + 2


def test_payoffs_of_somebody_else_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members have 1 payoffs"):
        rated({}, ["a", "b"], [1.0])
