"""Engines that move between policies of a real team, while it learns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, AsyncJobHandle, Notice
from troupe.cluster import ClusterSettings, EmbeddedCluster

# At every heartbeat, however small the difference: not for balance, but for many moves.
RESTLESS = {
    "inter": True,
    "threshold": 0.4,
    "hysteresis": 0,
    "sustain_seconds": 0,
    "cooldown_seconds": 0,
    "drain_seconds": 0,
}
STEPS = 4


@pytest.mark.slow
async def test_engines_that_move_do_not_change_what_is_learned(
    tmp_path: Path, models: Path
) -> None:
    settings = ClusterSettings(
        data_dir=tmp_path, panel=False, environment={"TROUPE_HEARTBEAT_SECONDS": "0.05"}
    )
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        house = House(cluster, client, tmp_path)
        still, stayed = await learn(house, models, {"inter": False})
        moved, moves = await learn(house, models, RESTLESS)
    assert stayed == 0
    assert moves > 0
    assert still == moved


async def learn(
    house: House, models: Path, balancing: Mapping[str, object]
) -> tuple[list[list[str]], int]:
    """Train the team; its last weights, moments and generators, and how many engines moved."""
    solver = {"path": str(models / "solver")}
    handle = await house.client.submit(
        job(
            models,
            **{
                "pipeline.steps": STEPS,
                "pipeline.deterministic": True,
                "policies.solver.model": solver,
                "policies.checker.model": solver,
                "policies.solver.engine.replicas": 2,
                "policies.checker.engine.replicas": 2,
                "balancing": balancing,
            },
        )
    )
    record = await handle.wait(timeout=PATIENCE)
    assert record.state == "succeeded", record
    assert not (await handle.audit()).violations
    states = []
    for policy in ("checker", "solver"):
        directory = house.data_dir / handle.id / "state" / policy
        (path,) = directory.glob(f"v{STEPS}-*/state.json")
        values = json.loads(path.read_text())
        states.append([values[part] for part in ("weights", "optimizer", "random")])
    return states, await moves_of(handle)


async def moves_of(handle: AsyncJobHandle) -> int:
    """According to the job's log."""
    texts = [event.text async for event in handle.watch() if isinstance(event, Notice)]
    return sum(" moved from " in text for text in texts)
