"""The trajectory benchmark: its worlds, its rows, its figures; and that it runs."""

from __future__ import annotations

import asyncio
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.pipeline.measure import StepEnd
from benchmarks.papers.trajectories.__main__ import figures
from benchmarks.papers.trajectories.slow_worlds import Worlds, play
from benchmarks.papers.trajectories.workload import FULL, QUICK, job, lockstep_rows, redundancy_rows
from tests.benchmarks.quick import quick_run
from troupe.workflow.errors import EnvironmentFault


class _Agents:
    """One agent that says something else in every trajectory."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __getitem__(self, name: str) -> _Agents:
        return self

    async def chat(self, messages: Any) -> _Agents:
        self.token_ids = (self._rng.randrange(10**6),)
        return self


async def test_waits_of_simulated_worlds_have_the_given_mean_and_deviation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    even = Worlds("train", row="even", turns=4, seconds=10, sigma=1)
    for seed in range(300):
        await play(even[seed], _Agents(seed), None)
    assert len(waits) == 1200
    assert statistics.fmean(waits) == pytest.approx(10, rel=0.02)
    assert statistics.pstdev(waits) == pytest.approx(1, rel=0.1)
    waits.clear()
    wide = Worlds("train", row="wide", turns=4, seconds=10, sigma=10)
    for seed in range(300):
        await play(wide[seed], _Agents(seed), None)
    assert min(waits) == 0, "truncated"
    waits.clear()
    rough = Worlds(
        "train", row="rough", turns=4, seconds=1, sigma=0, stalls=0.1, stall_seconds=99, faults=0.1
    )
    failed = []
    for seed in range(500):
        try:
            await play(rough[seed], _Agents(seed), None)
        except EnvironmentFault:
            failed.append(seed)
    assert len(failed) == pytest.approx(50, abs=20)
    assert sum(seconds == 100 for seconds in waits) == pytest.approx(50, abs=20)
    for seed in failed:
        await play(rough[seed], _Agents(seed), None)  # after a restart, its world works


def test_jobs_of_two_compared_rows_differ_in_one_setting_only(tmp_path: Path) -> None:
    for size in (FULL, QUICK):
        for batch, single in lockstep_rows((1.0, 10.0)):
            one, other = (job(row, size, tmp_path).model_dump() for row in (batch, single))
            assert one["pipeline"].pop("rollout") == "batch"
            assert other["pipeline"].pop("rollout") == "trajectory"
            for spec in (one, other):
                del spec["name"], spec["tasks"]["args"]["row"]
            assert one == other
        plain, spare = (job(row, size, tmp_path) for row in redundancy_rows(size))
        assert plain.tasks.args.keys() == spare.tasks.args.keys()
        assert plain.pipeline.redundant_trajectories == 0
        assert spare.pipeline.redundant_trajectories == size.group_size // 4
        assert plain.limits.trajectory_retries == spare.limits.trajectory_retries > 0


def test_figures_are_of_the_steady_state() -> None:
    ends = [(10.0, 99.0), (12.0, 1.0), (16.0, 2.0)]
    found = figures([StepEnd(at, {"redundancy/cancelled": n}) for at, n in ends], 50.0)
    assert (found.seconds, found.spread) == (3, 1)
    assert found.values == {"redundancy/cancelled": 1.5}


@pytest.mark.slow
def test_a_quick_run_measures_every_row() -> None:
    found = quick_run("papers.trajectories", seconds=600)
    assert found["trajectory_over_batch"].keys() == {"1", "10"}
    # A step of this size says little about speed, but it shows that nothing waits.
    assert found["trajectory_over_batch"]["10"] > 1
    assert found["redundancy"] > 0
    assert found["bias"]["cancelled"] > 0
