"""The pipeline benchmark from its command line to its object, on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_quick_run_measures_every_mode(tmp_path: Path) -> None:
    found = quick_run("papers.pipeline", "--out", str(tmp_path), seconds=600)
    assert "failures" not in found
    # A step of this size says little about speed; that it overlaps at all, it does.
    for setup in found["setups"].values():
        assert setup["micro_batch_s"] < setup["sync_s"] < setup["serial_s"]
        assert setup["shares"]["sync"]["both"] < 0.2 < setup["shares"]["micro_batch"]["both"]
    assert found["learned"]["micro_batch"]["bitwise_as_sync"] is True
    for name in ("ma", "ca", "ma-serial", "ma-sync", "ca-micro_batch", "ca-async"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
