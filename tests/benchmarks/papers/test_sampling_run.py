"""`benchmarks.papers.sampling` runs our side with several workers; its peers are run by hand."""

from __future__ import annotations

import pytest

from benchmarks.papers.sampling.__main__ import turn
from tests.benchmarks.quick import quick_run


def test_every_side_runs_first_equally_often() -> None:
    rounds = [turn("abc", number) for number in range(6)]
    assert all(sorted(one) == list("abc") for one in rounds)
    for places in zip(*rounds, strict=True):
        assert sorted(places) == sorted("abc" * 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_of_sampling_reports_its_figures() -> None:
    found = quick_run("papers.sampling", "--only", "workers")
    assert {"stable_spread", "stable_leduc"} <= found.keys()
    assert all(value > 0 for value in found.values())
