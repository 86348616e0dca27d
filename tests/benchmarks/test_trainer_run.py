"""The benchmarks of the trainer's update, from their command lines to their objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trainer.cases import QUICK, load
from tests.benchmarks.quick import quick_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_quick_run_compares_the_same_update_with_trls() -> None:
    """It fails by itself when the gradients of the two sides differ."""
    found = quick_run("trainer", "--steps", "1", seconds=1700)
    if found["over_trl"] is None:
        pytest.skip("TRL cannot be installed here")
    assert found["over_trl"] > 0
    assert found["over_trl_even"] > 0
    assert found["peak_memory_ratio"] > 0


def test_a_checkpoint_takes_the_place_of_the_small_models(tmp_path: Path) -> None:
    load(QUICK[0]).save_pretrained(tmp_path)
    found = quick_run("trainer", "--steps", "1", "--model", str(tmp_path), seconds=1700)
    assert found["over_trl"] is None or found["over_trl"] > 0


def test_what_runs_on_a_gpu_is_tried_out_on_the_cpu() -> None:
    found = quick_run("gpu", "--device", "cpu", seconds=1700)
    assert found["device"].startswith("CPU")
    assert 0 < found["update"]["mfu"] < 2
    assert found["update"]["tokens_per_second"] > 0
    assert found["copies"]["of_link"] > 0
    # What has no result says why; a part without a GPU may have none.
    for part in ("update_compiled", "swap", "transfer"):
        assert (found[part] is None) == (part in found["problems"])
