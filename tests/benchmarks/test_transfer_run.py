"""The transfer benchmark from its command line to its object."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_way_there_is() -> None:
    command = [sys.executable, "-m", "benchmarks.transfer", "--quick", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shm_zero_copy"] is True
    assert found["four_readers_ratio"] > 0
    assert found["grpc_gib_s"] > 0
    assert found["exposed_fraction"] > 0
    # What is not measured is null, not a number.
    assert (found["ucx_ratio"] is None) == (found["ucx_gib_s"] is None)
