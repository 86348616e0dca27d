"""The benchmark of checkpoints, from its command line to its object."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_reports_memory_and_time() -> None:
    found = quick_run("checkpoints", "--ranks", "2", seconds=540)
    assert 0 < found["checkpoint_rss_ratio"] < 1
    assert 0 < found["checkpoint_rss_over_largest"] < 4
    assert found["checkpoint_seconds"] > 0
