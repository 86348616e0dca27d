"""The benchmark of colocated and split devices, from its command line to its object."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_reports_both_ways() -> None:
    found = quick_run("colocate", seconds=540)
    assert set(found["seconds"]) == {"split_sync", "split_micro_batch", "colocate_sync"}
    assert found["colocate_over_split"] > 0
    assert found["switching_seconds"] > 0
