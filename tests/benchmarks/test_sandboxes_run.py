"""The benchmark of sandboxes runs at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_quick_run_measures_every_kind_of_call() -> None:
    command = [sys.executable, "-m", "benchmarks.sandboxes", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {
        "one_call_ms",
        "one_call_with_spare_ms",
        "trajectory_first_call_ms",
        "trajectory_call_ms",
    }
    assert all(value > 0 for value in found.values())
