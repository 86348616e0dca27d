"""The serverless benchmark from its command line to its object, on real services."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_of_serverless_reports_its_figures() -> None:
    found = quick_run("papers.serverless")
    assert {
        *("utilization", "dedicated_utilization", "overhead_p50_ms"),
        *("batched_overhead_p50_ms", "cold_start_p50_ms"),
    } <= found.keys()
    assert all(value > 0 for value in found.values()), found
    assert max(found["utilization"], found["dedicated_utilization"]) <= 1
