"""`benchmarks.selfplay`: its jobs are sound, its picture is drawn, and one of them runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.selfplay.__main__ import JOBS, job, main
from benchmarks.selfplay.figure import draw
from benchmarks.selfplay.measure import Curve


def test_the_examples_jobs_are_sound(tmp_path: Path) -> None:
    specs = {name: job(name, tmp_path, quick=False) for name in JOBS}
    assert specs["naive"].population is None
    same = [
        spec.model_dump(exclude={"name", "population", "policies", "seed"})
        for spec in specs.values()
    ]
    assert same[0] == same[1] == same[2], "they differ in whom the learner meets"


def test_curves_are_drawn() -> None:
    curves = {
        "naive": Curve(newest={0: 0.45, 10: 0.2}),
        "psro": Curve(newest={0: 0.45, 8: 0.3}, population=[(0, 0.45), (8, 0.1)]),
    }
    picture = draw(curves)
    assert picture.count("<polyline") == 3
    assert curves["naive"].final == 0.2
    assert curves["psro"].final == 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Members of a run so short are gone before they can be scored.
    main(["--quick", "--only", "naive", "--out", str(tmp_path)])
    *table, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert set(found) == {"untrained", "naive"}
    # A version of a run so short may be gone before it is scored, the first one too.
    untrained = found.pop("untrained")
    # A model that knows nothing plays nearly as who takes every move equally often.
    assert untrained is None or untrained == pytest.approx(0.4583, abs=0.05)
    assert all(0 <= value < 1 for value in found.values())
    assert len(table) == 2
    curves = json.loads((tmp_path / "selfplay.json").read_text())
    assert curves["naive"]["newest"][-1][0] == 4
