"""`benchmarks.sglang` runs from one end to the other, with a real server on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import quick_run
from tests.rollout.engines.real_server import interpreter


@pytest.mark.slow
def test_the_quick_benchmark_loses_no_turn_and_no_version(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    figures = quick_run("sglang", "--device", "cpu", "--python", python)
    assert figures["ratio_vs_bare"] > 0
    assert figures["updates"] == 4
    assert (figures["failed_turns"], figures["wrong_versions"]) == (0, 0)
    assert 0 < figures["exposed_ms_p50"] <= figures["update_ms_p50"]
