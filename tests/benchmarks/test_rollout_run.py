"""The rollout benchmark from its command line to its object, on a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_quick_run_measures_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rollout", "--quick", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # A busy machine says little about speed; that all of it is there, it does.
    assert found["ratio_vs_engine"] > 0.3
    assert 0 < found["turn_p50_ms"] <= found["turn_p99_ms"]
    assert found["in_flight"] == 100
    assert found["rss_mib_2000"] < 1536
