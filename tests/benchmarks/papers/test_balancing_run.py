"""The balancing benchmark from its command line to its object, on a real cluster."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.papers.balancing.migrations import migrate
from benchmarks.papers.balancing.workload import QUICK, ROWS, job
from tests.benchmarks.quick import quick_run


def test_the_rows_differ_in_balancing_only(tmp_path: Path) -> None:
    none, intra, both = (job(row, QUICK, tmp_path) for row in ROWS)
    same = {"name": "x", "routing": none.routing, "balancing": none.balancing}
    assert (
        intra.model_copy(update=same)
        == both.model_copy(update=same)
        == none.model_copy(update=same)
    )
    assert [spec.balances for spec in (none, intra, both)] == [False, False, True]
    assert none.routing.policy == "round_robin"
    assert intra.routing == both.routing


async def test_no_turn_is_lost_while_engines_move(tmp_path: Path) -> None:
    found = await migrate(40, tmp_path)
    assert found.moves >= 40
    assert found.lost == 0, found.failures
    assert found.answered == found.asked > 40
    assert found.handed_back > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_measures_every_row(tmp_path: Path) -> None:
    found = quick_run("papers.balancing", "--out", str(tmp_path), seconds=900)
    assert found["lost"] == 0
    assert found["both_over_none"] > 0
    # How fast a step of this size is says little; that engines move, and why, it does.
    assert found["engines_moved"]["both"] > 0 == found["engines_moved"]["intra"]
    assert found["disparity"]["both"] < found["disparity"]["none"]
    picture = ElementTree.fromstring((tmp_path / "balancing.svg").read_text())
    assert len(picture.findall(".//{*}polyline")) == 15
