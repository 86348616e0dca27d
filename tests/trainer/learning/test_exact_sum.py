"""Fixed-point sums: independent of order, within their bound, refused when they could overflow."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.learning.optimizer import FRACTION_BITS, ExactSum, NotSummable

SHAPES = [(3, 4), (5,), (1,)]


def _terms(seed: int, count: int, magnitude: float) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, generator=generator) * magnitude for shape in SHAPES]
        for _ in range(count)
    ]


def _sum(terms: list[list[torch.Tensor]], divisor: float = 1.0) -> list[torch.Tensor]:
    total = ExactSum(terms[0])
    for term in terms:
        total.add(term)
    result = [torch.empty(shape) for shape in SHAPES]
    total.write(result, divisor)
    return result


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(1, 40), st.sampled_from([1e-6, 1.0, 1e4]))
def test_any_order_gives_the_same_bits(seed: int, count: int, magnitude: float) -> None:
    terms = _terms(seed, count, magnitude)
    shuffled = random.Random(seed).sample(terms, count)
    for one, two in zip(_sum(terms, 7.0), _sum(shuffled, 7.0), strict=True):
        assert torch.equal(one, two)


@settings(deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 40),
    st.sampled_from([1e-9, 1e-6, 1.0, 1e4]),
    st.floats(1, 1e6),
)
def test_the_error_is_within_the_stated_bound(
    seed: int, count: int, magnitude: float, divisor: float
) -> None:
    terms = _terms(seed, count, magnitude)
    for i, found in enumerate(_sum(terms, divisor)):
        # Python's own correctly rounded sum of the same numbers.
        columns = np.stack([term[i].double().numpy().ravel() for term in terms], axis=1)
        exact = np.array([math.fsum(column) for column in columns]) / divisor
        allowed = count * 2.0 ** -(FRACTION_BITS + 1) / divisor + np.abs(exact) * 2.0**-23
        assert (np.abs(found.double().numpy().ravel() - exact) <= allowed).all()


def test_absent_gradients_count_as_zero() -> None:
    total = ExactSum([torch.zeros(2), torch.zeros(0), torch.zeros(1)])
    total.add([torch.tensor([1.0, -2.5]), torch.zeros(0), None])
    total.add([None, None, torch.tensor([3.0])])
    result = [torch.empty(2), torch.empty(0), torch.empty(1)]
    total.write(result, 2.0)
    assert [t.tolist() for t in result] == [[0.5, -1.25], [], [1.5]]
    total.clear()
    total.write(result, 1.0)
    assert [t.tolist() for t in result] == [[0.0, 0.0], [], [0.0]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_sum_that_may_leave_the_range_is_refused_in_any_order(order: tuple[int, ...]) -> None:
    # The true sum is small, but a refusal must not depend on the order of terms.
    terms = [[torch.tensor([value])] for value in (4e6, -4e6, 4e6)]
    total = ExactSum([torch.zeros(1)])
    for i in order[:2]:
        total.add(terms[i])
    with pytest.raises(NotSummable, match=r"may exceed 2\^23"):
        total.add(terms[order[2]])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30])
def test_terms_that_cannot_be_summed_are_refused(value: float) -> None:
    total = ExactSum([torch.zeros(3)])
    with pytest.raises(NotSummable):
        total.add([torch.tensor([1.0, value, 2.0])])


def test_values_over_the_whole_range_are_summed() -> None:
    total = ExactSum([torch.zeros(2)])
    for _ in range(2):
        total.add([torch.tensor([4.1e6, -4.1e6])])
    result = [torch.empty(2, dtype=torch.float64)]
    total.write(result, 1.0)
    assert result[0].tolist() == [8.2e6, -8.2e6]
