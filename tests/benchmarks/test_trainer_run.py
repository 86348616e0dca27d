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
