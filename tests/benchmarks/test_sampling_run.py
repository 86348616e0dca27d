"""`benchmarks.sampling` runs our side with several workers; its peers are run by hand."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs() -> None:
    found = quick_run("sampling", "--only", "workers")
    assert {"stable_spread", "stable_leduc"} <= found.keys()
    assert all(value > 0 for value in found.values())
