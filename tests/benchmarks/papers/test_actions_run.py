"""The benchmark of actions runs, and its claims about reservations hold."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_measures_all_parts() -> None:
    found = quick_run("papers.actions", seconds=600)
    # Sleeping actions with a fixed share take four times as long as with all that they can use.
    assert found["paced_act_elastic_s"] < found["paced_act_fixed_s"]
    assert 1 < found["simulated_gain"]["256"] < found["simulated_gain"]["512"]
    assert 0 < found["resources_saved"] < 1
    assert found["gpus_for_equal_latency"] in (12, 36)
    assert found["decision_p99_ms"] > 0
    # No order gains more than the bound.
    assert set(found["real_gain"]) == {"1", "2"}
    assert all(found["real_gain"][n] <= found["real_gain_most"][n] for n in ("1", "2"))
    assert set(found["gain_by_cores"]) == {"2", "8"}
    assert set(found["real_gain_alike"]) == {"learned", "again", "told"}
    likely = found["gain_by_likeness"]["0.9"]
    assert all(1 < likely[name] <= likely["most"] for name in ("learned", "again", "told"))
    assert found["overhead"] > 0
