"""`benchmarks.distillation`: its jobs are sound, and it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.distillation import QUICK, WAYS, first_at, job
from tests.benchmarks.quick import quick_run


def test_jobs_of_the_benchmark_differ_in_the_student_s_signal_only() -> None:
    specs = {way: job(Path("s"), Path("t"), QUICK, 1e-3, how) for way, how in WAYS.items()}
    same = [spec.model_dump(exclude={"algorithm", "policies"}) for spec in specs.values()]
    assert same[0] == same[1] == same[2]
    found = [spec.algorithm.distillation for spec in specs.values()]
    assert [one and one.divergence for one in found] == [None, "full", "sampled"]


def test_the_first_time_that_a_curve_is_high_enough() -> None:
    assert first_at([(0, 0.1), (8, 0.9), (16, 0.5)], 0.5) == 8
    assert first_at([(0, 0.1)], 0.5) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_of_distillation_reports_its_figures() -> None:
    found = quick_run("distillation")
    assert set(found["ways"]) == set(WAYS)
    assert all(len(way["curve"]) == QUICK.steps + 1 for way in found["ways"].values())
