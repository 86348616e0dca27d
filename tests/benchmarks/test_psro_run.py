"""`benchmarks.psro` runs both sides and says what it found."""

from __future__ import annotations

import json

import pytest

from benchmarks.psro.__main__ import main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    *table, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert found["kuhn_nashconv"] < 1e-6
    assert found["leduc_nashconv"] <= found["leduc_goal"]
    assert 0 < found["cpu_seconds"] < found["openspiel_cpu_seconds"]
    assert any("OpenSpiel" in line and "not reached" not in line for line in table)
