"""The benchmark of a team on one engine, from its command line to its object."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_team_shares_one_base_without_a_wrong_version() -> None:
    found = quick_run("team_engine", "--only", "embedded")["embedded"]
    # Several bases of this size would not show next to the libraries; the engines' tests do.
    assert set(found["memory_over_one_base"]) == {"2", "4", "6"}
    assert found["tokens_over_one_policy"].keys() == found["per_cpu_second"].keys()
    assert found["turns_during_updates"] >= found["updates"] == 6
    assert found["wrong_versions"] == 0
    assert found["lost_turns"] == 0
