"""`benchmarks.selfplay`: its jobs are sound, its picture is drawn, and all of them run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.selfplay import JOBS, Curve, draw, job, main
from tests.benchmarks.quick import figures


def test_the_examples_jobs_are_sound(tmp_path: Path) -> None:
    specs = {name: job(name, tmp_path, quick=False) for name in JOBS}
    populations = [spec.population for spec in specs.values()]
    assert [one.algorithm for one in populations if one] == ["self_play", "fictitious", "psro"]
    assert all(one is not None and one.game == "kuhn_poker" for one in populations)
    same = [
        spec.model_dump(exclude={"name", "population", "policies", "seed"})
        for spec in specs.values()
    ]
    assert same[0] == same[1] == same[2], "they differ in whom the learner meets"


def test_curves_are_drawn() -> None:
    curves = {
        "naive": Curve([(0, 0.45), (10, 0.2)]),
        "psro": Curve([(0, 0.45), (6, 0.3), (8, 0.1)]),
    }
    picture = draw(curves)
    assert picture.count("<polyline") == 2
    assert curves["naive"].final == 0.2
    assert curves["psro"].tail == pytest.approx(0.2)


def test_a_curve_that_begins_late_has_no_untrained_model() -> None:
    with pytest.raises(ValueError, match="after step 3"):
        _ = Curve([(3, 0.4)]).untrained


@pytest.mark.slow
def test_a_quick_run_of_selfplay_reports_its_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out.strip()
    *table, _, _ = printed.splitlines()  # and the machine, and the object
    found = figures(printed)
    assert set(found) == {"untrained", *JOBS}
    # A model that knows nothing plays nearly as who takes every move equally often.
    assert found["untrained"] == pytest.approx(0.4583, abs=0.05)
    assert all(0 <= value < 1 for value in found.values())
    assert len(table) == 1 + len(JOBS)
    curves = json.loads((tmp_path / "selfplay.json").read_text())
    for name in JOBS:
        assert [step for step, _ in curves[name]["points"]] == [0, 2, 4], name
