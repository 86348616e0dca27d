"""The benchmarks of rollout from their command line to their object, on a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def run(module: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_quick_run_measures_what_lies_before_the_engine() -> None:
    found = run("benchmarks.rollout")
    # A busy machine says little about speed; that all of it is there, it does.
    assert found["ratio_vs_engine"] > 0.3
    assert 0 < found["turn_p50_ms"] <= found["turn_p99_ms"]
    assert found["in_flight"] == 100
    assert found["rss_mib_2000"] < 1536


@pytest.mark.slow
def test_a_quick_run_measures_device_classes() -> None:
    found = run("benchmarks.affinity")
    assert found["affinity_over_one_class"] > 0.7
    assert set(found) >= {"inferred_over_one_class", "mixed_over_one_class"}
