"""The benchmark of rollout from its command line to its object, on a real service."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_measures_what_lies_before_the_engine() -> None:
    found = quick_run("rollout", seconds=600)
    # A busy machine says little about speed; that all of it is there, it does.
    assert found["ratio_vs_engine"] > 0.3
    assert 0 < found["turn_p50_ms"] <= found["turn_p99_ms"]
    assert found["in_flight"] == 100
    assert found["rss_mib_2000"] < 1536
    assert 0 < found["turn_cpu_ms_short_busy"] < found["turn_cpu_ms_short"]
    assert found["turn_cpu_ms_short"] < found["turn_cpu_ms_long"]
