"""The benchmark of the twin: its predictions of live runs, and its smoke run."""

from __future__ import annotations

import json

import pytest

from benchmarks.papers.twin.__main__ import _LIVE, predicted
from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ma", "ca"])
def test_steps_are_predicted_within_ten_percent_of_live_ones(name: str) -> None:
    live = json.loads(_LIVE.read_text())["setups"][name]
    found = predicted(name)
    assert set(found) == set(live) == {"serial", "sync", "micro_batch", "async"}
    for mode, means in found.items():
        assert means.seconds == pytest.approx(live[mode]["seconds"], rel=0.1), mode


@pytest.mark.slow
def test_a_quick_run_reports_what_it_predicts() -> None:
    found = quick_run("papers.twin", seconds=300)
    assert found["live"]["worst_error"] < 0.1
    assert found["flexmarl"]["ma_over_fixed"] > 1.1
    assert found["rollart"]["over_sync"] > found["rollart"]["over_one_off"]
    assert found["rollart"]["trajectory_level"]["10"] > found["rollart"]["trajectory_level"]["1"]
    assert found["tangram"]["gain_by_groups"]["512"] > found["tangram"]["gain"]["512"] > 1
    sampling, psro = found["malib"]["sampling"], found["malib"]["psro"]
    assert sampling["python"]["64"] > sampling["arrays"]["64"] > sampling["arrays"]["16"]
    assert psro["16"] > psro["4"] > psro["1"] == 1
    for load in found["control"].values():
        full = load["quiet"]["full_at_devices"]
        assert full[load["quiet"]["full_first"]] == min(full.values())
        assert load["busy"]["cores"]["store"] > load["quiet"]["cores"]["store"] > 0
    assert found["microseconds_per_turn"] > 0
    assert found["decision_p99_ms"] == max(found["decisions_ms"].values())
