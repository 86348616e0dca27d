"""What needs a GPU, tried out without one: the command and each of its parts."""

from __future__ import annotations

import pytest

from benchmarks.gpu.__main__ import OTHERS, OWN, parts
from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_on_the_device_that_it_is_told() -> None:
    assert parts("cpu", quick=True).keys() == {*OWN, *OTHERS}
    found = quick_run("gpu", "--device", "cpu", seconds=900)
    assert found["problems"] == {}
    assert found["transfer"]["device"] == "cpu"
    assert found["swap"]["memcpy_ratio"] > 0
    assert all(found[name] for name in OWN)
