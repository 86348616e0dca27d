"""`benchmarks.networks` runs every task and reports its results."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_of_networks_reports_its_figures() -> None:
    found = quick_run("networks")
    assert found.keys() == {"mappo", "maddpg", "qmix", "vdn"}
    for row in found.values():
        assert len(row["plateaus"]) == 1
        assert row["steps"] > 0
    # Two updates are not enough for anything that counts.
    assert not found["mappo"]["reached"]
    assert not found["maddpg"]["reached"]
