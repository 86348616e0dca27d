"""The benchmarks of the trainer's update, from their command lines to their objects."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def last_line(*arguments: str) -> Any:
    """What a benchmark's last line says."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_quick_run_compares_the_same_update_with_trls() -> None:
    """It fails by itself when the gradients of the two sides differ."""
    found = last_line("benchmarks.trainer", "--quick", "--json", "--steps", "1")
    if found["over_trl"] is None:
        pytest.skip("TRL cannot be installed here")
    assert found["over_trl"] > 0
    assert found["over_trl_even"] > 0
    assert found["peak_memory_ratio"] > 0


def test_what_runs_on_a_gpu_is_tried_out_on_the_cpu() -> None:
    found = last_line("benchmarks.gpu", "--device", "cpu", "--quick", "--json")
    assert found["device"].startswith("CPU")
    assert 0 < found["update"]["mfu"] < 2
    assert found["update"]["tokens_per_second"] > 0
    assert found["copies"]["of_link"] > 0
    # What has no result says why; a part without a GPU may have none.
    for part in ("update_compiled", "swap", "transfer"):
        assert (found[part] is None) == (part in found["problems"])
