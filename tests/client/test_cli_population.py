"""`troupe population` and the SDK below it, against the orchestrator double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.conftest import Run, Stage
from troupe.client import AsyncClient, Client
from troupe.rpc import NotFound


def test_show(run: Run, cluster: Stage) -> None:
    status, out, err = run("population", "show", "mine")
    assert (status, err) == (0, "")
    assert "psro, symmetric, iteration 2, 4 matches played, 3 due" in out
    assert "NashConv 0.900 -> 0.500" in out
    assert "player--0 plays player@5" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "27.5 ± 2.2" in out or "27.5 ± 2.3" in out
    # The payoff matrix: the newest rows, the other half of a symmetric cell, unplayed cells.
    assert lines["player@9"].split()[1:] == [".", ".", "."]
    assert "-0.500" in out
    assert "0 ± 0.98" in out
    assert json.loads(run("population", "show", "mine", "--json")[1])["cells"][1]["exact"] is True


def test_a_job_without_one_is_one_line(run: Run, cluster: Stage) -> None:
    status, out, err = run("population", "show", "plain")
    assert (status, out) == (2, "")
    assert "job plain has no population" in err
    assert "Traceback" not in err


def test_matches_of_several_pages(run: Run, cluster: Stage) -> None:
    status, out, _ = run("population", "matches", "mine", "--member", "player@5")
    assert status == 0
    assert [f"m0x1-t{n}" in out for n in range(3)] == [True] * 3
    assert "player@5" in out
    assert cluster.fake.requests("ListMatches")[0].member_id == "player@5"
    rows = json.loads(run("population", "matches", "mine", "--limit", "1", "--json")[1])
    assert rows[0]["payoffs"] == {"p0": -1.0, "p1": 1.0}


def test_export(run: Run, cluster: Stage, tmp_path: Path) -> None:
    status, out, err = run("population", "export", "mine", "player@5", str(tmp_path / "five"))
    assert (status, err) == (0, "")
    assert "exported player@5 to" in out
    assert (tmp_path / "five" / "model.safetensors").read_bytes() == b"weights"
    status, _, err = run("population", "export", "mine", "player@7", str(tmp_path / "seven"))
    assert status != 0
    assert "member" in err
    assert [path.name for path in tmp_path.iterdir() if path.name in ("five", "seven")] == ["five"]


async def test_sdk(client: AsyncClient) -> None:
    found = await client.job("mine").population()
    assert found.pool_of("p1").members[1].parent == "player@0"
    assert found.cells[0].half_width == pytest.approx(0.98)
    assert found.history[1].mixtures == {"player": {"player@0": 0.25, "player@5": 0.75}}
    assert found.ratings[0].cautious == pytest.approx(27.5 - 3 * 2.25)
    assert [one.trajectory_id for one in await client.job("mine").matches(limit=3)] == [
        "m0x1-t0",
        "m0x1-t1",
        "m0x1-t2",
    ]
    with pytest.raises(NotFound):
        await client.job("plain").population()


def test_blocking_sdk(cluster: Stage) -> None:
    with Client(cluster.address) as troupe:
        assert troupe.job("mine").population().matches_played == 4
        assert len(troupe.job("mine").matches()) == 3
