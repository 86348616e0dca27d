"""`benchmarks.papers.psro` runs both sides and reports its results."""

from __future__ import annotations

import pytest

from benchmarks.papers.psro.__main__ import main
from tests.benchmarks.quick import figures


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_of_psro_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    printed = capsys.readouterr().out.strip()
    found = figures(printed)
    assert found["kuhn_nashconv"] < 1e-6
    assert found["leduc_nashconv"] <= found["leduc_goal"]
    assert 0 < found["cpu_seconds"] < found["openspiel_cpu_seconds"]
    assert any("OpenSpiel" in line and "not reached" not in line for line in printed.splitlines())
