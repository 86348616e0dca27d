"""`benchmarks.sglang` runs from one end to the other, with a real server on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.engines.real_server import interpreter


@pytest.mark.slow
def test_the_quick_benchmark_loses_no_turn_and_no_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.sglang", "--device", "cpu", "--quick", "--json"]
    ran = subprocess.run(
        [*command, "--python", interpreter(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["ratio_vs_bare"] > 0
    assert figures["updates"] == 4
    assert (figures["failed_turns"], figures["wrong_versions"]) == (0, 0)
    assert 0 < figures["exposed_ms_p50"] <= figures["update_ms_p50"]
