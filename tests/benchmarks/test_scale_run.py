"""The benchmark of many conversations, from its command line to its object."""

from __future__ import annotations

import pytest

from benchmarks.scale import longest
from tests.benchmarks.quick import quick_run


def test_the_longest_stall_is_of_the_window_alone() -> None:
    before = {("wall", 0.1): 5.0, ("wall", 1.0): 6.0, ("wall", 9.0): 6.0, ("cpu", 9.0): 6.0}
    after = {("wall", 0.1): 50.0, ("wall", 1.0): 51.0, ("wall", 9.0): 51.0, ("cpu", 9.0): 51.0}
    assert longest(before, after, "wall") == 0.1
    assert longest(before, after | {("wall", 1.0): 52.0, ("wall", 9.0): 52.0}, "wall") == 1.0


@pytest.mark.slow
def test_a_quick_run_measures_every_service() -> None:
    found = quick_run("scale", seconds=540)
    cost = found["cpu_s_per_1000_turns"]
    services = {"rollout", "experience_store", "redis", "trainer", "reward", "orchestrator"}
    assert cost.keys() == services | {"total", "engines", "services"}
    assert cost["total"] == pytest.approx(sum(cost[name] for name in services), abs=0.01)
    assert 0 < cost["engines"] < cost["rollout"]
    assert 0 < found["orchestrator_share"] < 1
    # The unit is four bytes per id and per log-prob; an id of a small vocabulary takes two bytes at
    # most. So each token is sent once, and none twice.
    assert 0.5 < found["bytes_over_unique"] < 1
    assert found["growth_2000_to_8000"] == 1
    assert found["stall_ms"].keys() == services - {"redis"}
    assert all(both["cpu"] <= both["wall"] for both in found["stall_ms"].values())
    small, large = (found["clusters"][gpus] for gpus in ("64", "256"))
    assert large["cores"] == pytest.approx(4 * small["cores"], rel=0.02)
