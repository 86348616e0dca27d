"""The benchmark of sandboxes runs at all."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run
from tests.support.needs import BUBBLEWRAP


@pytest.mark.slow
@BUBBLEWRAP
def test_a_quick_run_measures_every_kind_of_call() -> None:
    found = quick_run("sandboxes", seconds=300)
    assert set(found) == {
        "one_call_ms",
        "one_call_with_spare_ms",
        "trajectory_first_call_ms",
        "trajectory_call_ms",
    }
    assert all(value > 0 for value in found.values())
