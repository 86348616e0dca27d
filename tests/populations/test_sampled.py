"""Sampled payoffs agree with the exact ones within their intervals, and certain cells are left
alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspiel")

from troupe.populations.games import Array
from troupe.populations.histories import Histories
from troupe.populations.payoffs import PayoffTable, Precision
from troupe.populations.psro import MetaGame, SampledGame


def mixed_tables(tree: Histories, random: np.random.Generator) -> list[Array]:
    """Some behaviour of every player."""
    found = []
    for legal in tree.legal:
        shares = random.dirichlet(np.full(legal.shape[1], 0.3), len(legal)) * legal + 1e-9 * legal
        found.append(shares / shares.sum(axis=1, keepdims=True))
    return found


@pytest.mark.parametrize("name", ["kuhn_poker", "kuhn_poker(players=3)", "leduc_poker"])
def test_sampled_payoffs_agree_with_exact_ones(name: str) -> None:
    tree, random = Histories.of(name), np.random.default_rng(2)
    exact, played = MetaGame(tree.form), SampledGame(tree, Precision(least=400), seed=3)
    for _ in range(3):
        answers = [tree.plan(p, one) for p, one in enumerate(mixed_tables(tree, random))]
        assert exact.grow(answers)
        assert played.grow(answers)
    assert played.payoffs.shape == exact.payoffs.shape
    inside = []
    for members in itertools.product(*map(range, exact.sizes)):
        cell = played.table.cell(members)
        assert cell is not None
        assert not cell.exact
        apart = np.abs(cell.mean - exact.payoffs[(slice(None), *members)])
        deviation = np.sqrt(cell.variance / cell.matches)
        assert (apart <= 5 * deviation).all(), members
        inside += (apart <= 1.96 * deviation).tolist()
    # A 95 % interval would miss one in twenty independent cells; intervals of one cell are not
    # independent.
    assert np.mean(inside) > 0.85


def test_only_uncertain_cells_are_played_again() -> None:
    tree, random = Histories.of("leduc_poker"), np.random.default_rng(0)
    played = SampledGame(tree, Precision(least=100, most=4000, half_width=0.25), seed=1)
    first = played.table.cells[0, 0]
    counted, mean = first.matches, first.mean.copy()
    assert 100 < counted < 4000, "as many as its variance asks for"
    played.grow([tree.plan(p, one) for p, one in enumerate(mixed_tables(tree, random))])
    assert (played.table.cells[0, 0].matches, played.table.cells[0, 0].mean.tolist()) == (
        counted,
        mean.tolist(),
    )
    assert len(played.table.cells) == 4
    for cell in played.table.cells.values():
        assert cell.half_width() <= 0.25 or cell.matches == 4000
    found = {cell.matches for cell in played.table.cells.values()}
    assert len(found) > 1, "cells of other variances need other numbers of matches"


def test_a_copy_grows_apart_and_a_seed_is_a_table() -> None:
    tree, random = Histories.of("kuhn_poker"), np.random.default_rng(4)
    answers = [tree.plan(p, one) for p, one in enumerate(mixed_tables(tree, random))]
    one, other = (SampledGame(tree, Precision(least=20), seed=7) for _ in range(2))
    aside = one.copy()
    aside.grow(answers)
    assert (one.sizes, aside.sizes) == ((1, 1), (2, 2))
    one.grow(answers)
    other.grow(answers)
    assert one.table.to_json() == other.table.to_json() == aside.table.to_json()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(*[st.floats(-100, 100)] * 2), max_size=5), min_size=1, max_size=5)
)
def test_matches_counted_together_are_matches_counted_one_by_one(
    batches: list[list[tuple[float, float]]],
) -> None:
    one, all_together = PayoffTable([1, 1]), PayoffTable([1, 1])
    for batch in batches:
        all_together.record_all((0, 0), np.array(batch).reshape(-1, 2))
        for payoffs in batch:
            one.record((0, 0), payoffs)
    expected, found = one.cell((0, 0)), all_together.cell((0, 0))
    assert found is not None
    if expected is None:
        assert found.matches == 0
        return
    assert found.matches == expected.matches
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9)
    np.testing.assert_allclose(found.squares, expected.squares, atol=1e-6, rtol=1e-9)
