"""The benchmark of suspension: its figures from spans made by hand, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.papers.pipeline.measure import StepEnd
from benchmarks.swap.sharing import figures
from benchmarks.swap.six_players import AGENTS
from testbed.timeline import TimelineSpan
from tests.benchmarks.quick import quick_run


def test_work_of_a_step_that_has_not_ended_counts_when_it_was_done() -> None:
    """Two trainers, 10 s between the ends of steps 1 and 2; a sample has 100 tokens."""
    values = {
        f"{agent}/{name}": value
        for agent in AGENTS
        for name, value in {
            "tokens": 1600.0,
            "samples": 16.0,
            "train/swaps": 2.0,
            "train/swap_seconds": 0.1,
        }.items()
    }
    steps = [StepEnd(at, values) for at in (100.0, 110.0, 120.0)]
    spans = [
        # Half of it was done before.
        TimelineSpan("t0", "train", "ada", 98.0, 102.0, 4000),
        TimelineSpan("t0", "train", "ben", 102.0, 108.0, 6000),
        TimelineSpan("t0", "step", "ben", 108.0, 109.0),
        TimelineSpan("t1", "train", "cleo", 100.0, 110.0, 10000),
        # Engines' work is not trainers' work.
        TimelineSpan("engine", "generate", "ada", 100.0, 110.0, 3),
    ]
    row = figures("shared", 2, steps, spans)
    assert row.seconds == 10
    assert row.samples_per_second == pytest.approx((2000 + 6000 + 10000) / 100 / 10)
    assert row.utilization == pytest.approx(19 / 20)
    assert row.swaps == 12
    assert row.exposed == pytest.approx(0.6 / 20)


@pytest.mark.slow
def test_a_quick_run_measures_both_parts() -> None:
    found = quick_run("swap", seconds=600)
    assert found["memcpy_ratio"] > 0
    assert 0 < found["utilization"] <= 1
    # Steps of this size are too short for a figure; that policies came and went, they tell.
    assert found["exposed_fraction"] > 0
    assert found["over_dedicated"] > 0
