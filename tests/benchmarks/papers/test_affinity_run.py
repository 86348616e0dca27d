"""The benchmark of hardware affinity from its command line to its object, on a real service."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_measures_device_classes() -> None:
    found = quick_run("papers.affinity", seconds=600)
    assert found["affinity_over_one_class"] > 0.7
    assert set(found) >= {"inferred_over_one_class", "mixed_over_one_class"}
