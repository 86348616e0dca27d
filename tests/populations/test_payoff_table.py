"""Payoffs of matches: counted, kept, and asked for where they are not known well enough."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.populations import PayoffTable, Precision, matches_due, seats
from troupe.populations.payoffs import episode_of_match


def test_means_and_variances_are_those_of_the_matches() -> None:
    table = PayoffTable([1, 2])
    played = np.random.default_rng(0).normal(size=(50, 2))
    for payoffs in played:
        table.record((0, 1), payoffs.tolist())
    cell = table.cell((0, 1))
    assert cell is not None
    assert cell.matches == 50
    assert cell.mean == pytest.approx(played.mean(0))
    assert cell.variance == pytest.approx(played.var(0, ddof=1))
    # Student's, with 49 degrees of freedom. A cell alone in a table is like any other.
    width = pytest.approx(2.0095752 * played.std(0, ddof=1).max() / math.sqrt(50))
    assert cell.half_width() == cell.half_width(table.pooled) == width
    with pytest.raises(ValueError, match=r"\(0, 0\) have not played"):
        table.tensor()
    table.settle((0, 0), [1, -1])
    assert table.tensor()[:, 0, 0].tolist() == [1, -1]
    assert table.tensor()[:, 0, 1] == pytest.approx(played.mean(0))


def test_symmetric_games_share_cells() -> None:
    table = PayoffTable([2, 2, 2], symmetric=True)
    assert len(list(table.all())) == 4
    table.record((1, 0, 0), [5, 1, 3])
    table.record((0, 0, 1), [2, 4, 7])
    cell = table.cell((0, 1, 0))
    assert cell is not None
    assert (cell.matches, cell.mean.tolist()) == (2, [2.5, 2.5, 6.0])
    for members in ((0, 0, 0), (0, 1, 1), (1, 1, 1)):
        table.settle(members, [1, 2, 3])
    tensor = table.tensor()
    for seats_ in itertools.permutations(range(3)):
        # The member decides, not the seat.
        moved = np.transpose(tensor, (0, *(1 + s for s in seats_)))
        assert np.array_equal(moved[list(seats_)], tensor)
    assert tensor[:, 0, 0, 1].tolist() == [2.5, 2.5, 6.0]


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(-1e6, 1e6)), max_size=30),
)
def test_a_table_that_was_written_down_is_the_same(
    symmetric: bool, matches: list[tuple[int, int, float]]
) -> None:
    table, half = PayoffTable([3, 3], symmetric), len(matches) // 2
    for row, column, payoff in matches[:half]:
        table.record((row, column), [payoff, -payoff])
    again = PayoffTable.from_json(json.loads(json.dumps(table.to_json())))
    for row, column, payoff in matches[half:]:
        table.record((row, column), [payoff, -payoff])
        again.record((row, column), [payoff, -payoff])
    assert again.to_json() == table.to_json()


def test_pools_grow_and_keep_what_is_known() -> None:
    table = PayoffTable([1, 1])
    table.record((0, 0), [1, -1])
    table.grow([2, 1])
    assert set(table.all()) - set(table.cells) == {(1, 0)}
    with pytest.raises(ValueError, match="cannot shrink"):
        table.grow([1, 1])
    with pytest.raises(ValueError, match="one pool"):
        PayoffTable([1, 1], symmetric=True).grow([2, 1])
    for members, payoffs, told in (
        ((0, 1), [1, 1], "no members"),
        ((0,), [1, 1], "no members"),
        ((0, 0), [1], "2 finite payoffs"),
        ((0, 0), [1, math.nan], "2 finite payoffs"),
    ):
        with pytest.raises(ValueError, match=told):
            table.record(members, payoffs)


def test_only_missing_and_uncertain_cells_are_played() -> None:
    table = PayoffTable([2, 2])
    precision = Precision(least=4, most=8, half_width=0.7)
    assert matches_due(table, precision) == [(m, 4) for m in itertools.product((0, 1), (0, 1))]
    for number in range(4):
        table.record((0, 0), [number / 10, -1])
        table.record((0, 1), [number % 2, 0])
        table.record((1, 0), [2 * (number % 2), 0])
    table.settle((1, 1), [0, 0])
    # A width of 0.92 instead of 0.7 lacks 2.9 matches of 4.
    assert matches_due(table, precision) == [((1, 0), 4), ((0, 1), 3)], "the least certain first"
    for number in range(4):
        table.record((1, 0), [2 * (number % 2), 0])
    assert matches_due(table, precision) == [((0, 1), 3)], "as good as it gets"
    assert matches_due(table, Precision(least=4)) == []


def test_a_few_equal_results_do_not_end_the_matches() -> None:
    table, precision = PayoffTable([2, 1]), Precision(least=8, most=64, half_width=0.1)
    for _ in range(8):
        table.record((0, 0), [1, -1])
    table.record_all((1, 0), np.full((8, 2), 0.1))
    assert matches_due(table, precision) == [], "nothing has ever varied"
    for number in range(56):
        table.record((1, 0), [number % 2, -(number % 2)])
    cell = table.cells[0, 0]
    assert cell.half_width() == 0.0 < cell.half_width(table.pooled)
    # The width falls with the matches, not with their root: twice as many are enough.
    assert matches_due(table, precision) == [((0, 0), 8)]
    for _ in range(8):
        table.record((0, 0), [1, -1])
    assert matches_due(table, precision) == []
    again = PayoffTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.pooled.tolist() == table.pooled.tolist()


def test_in_symmetric_games_everybody_sits_everywhere() -> None:
    table = PayoffTable([1, 1, 1], symmetric=True)
    assert matches_due(table, Precision(least=4)) == [((0, 0, 0), 6)]


def test_copies_of_a_member_are_one_player() -> None:
    """So its payoff against itself has no noise: a zero-sum game is even, with certainty."""
    table, one, many = (PayoffTable([2, 2, 2], symmetric=True) for _ in range(3))
    luck = np.random.default_rng(0).normal(size=(6, 3))
    luck -= luck.mean(axis=1, keepdims=True)
    for payoffs in luck:
        table.record((1, 1, 1), payoffs.tolist())
        one.record((1, 0, 1), payoffs.tolist())
    many.record_all((1, 0, 1), luck)
    even, mixed, same = table.cell((1, 1, 1)), one.cell((1, 0, 1)), many.cell((0, 1, 1))
    assert even is not None
    assert mixed is not None
    assert same is not None
    assert even.mean == pytest.approx(np.zeros(3))
    assert even.half_width(table.pooled) == pytest.approx(0.0)
    twice = luck[:, [0, 2]].mean()
    assert mixed.mean == pytest.approx([luck[:, 1].mean(), twice, twice])
    assert same.mean == pytest.approx(mixed.mean)
    assert same.squares == pytest.approx(mixed.squares)
    # The lack of variance there says nothing about other cells.
    table.record((0, 0, 1), [1.0, 1.0, -2.0])
    table.record((0, 0, 1), [-1.0, -1.0, 2.0])
    assert table.pooled.tolist() == [2.0, 2.0, 8.0]


@pytest.mark.parametrize("players", [1, 2, 3, 4])
def test_everybody_sits_everywhere_and_behind_everybody(players: int) -> None:
    turns = [seats(players, episode) for episode in range(math.factorial(players))]
    assert sorted(turns) == sorted(itertools.permutations(range(players)))
    assert turns[0] == tuple(range(players))
    for first in range(0, len(turns), players):
        for places in zip(*turns[first : first + players], strict=True):
            assert sorted(places) == list(range(players))
    assert seats(players, len(turns)) == turns[0]


@pytest.mark.parametrize("players", [2, 3, 4])
def test_all_seatings_occur_equally_often(
    players: int,
) -> None:
    orders = math.factorial(players - 1)
    period = players * math.lcm(players, orders) * orders
    kept: Counter[tuple[int, ...]] = Counter()
    changed: Counter[tuple[int, ...]] = Counter()
    for match in range(period):
        place = seats(players, episode_of_match(players, match))
        own = seats(players, match)
        kept[place] += 1
        changed[tuple(own[one] for one in place)] += 1
    for met in (kept, changed):
        assert len(met) == math.factorial(players)
        assert len(set(met.values())) == 1
    # Everybody has sat everywhere long before.
    first = [seats(players, episode_of_match(players, match)) for match in range(players**2)]
    assert all({one[player] for one in first} == set(range(players)) for player in range(players))
