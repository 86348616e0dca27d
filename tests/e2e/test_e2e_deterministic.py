"""Deterministic mode on real engines and trainers: other timing, the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["play", "lines"])
async def test_sync_and_micro_batch_end_with_the_same_bits(
    house: House, models: Path, workflow: str
) -> None:
    """Weights, optimizer moments and random generators, although claims are cut differently, and
    although trajectories began while the step before was trained."""
    found = []
    for mode, micro_batch, early in (
        ("sync", 16, False),
        ("micro_batch", 5, False),
        ("micro_batch", 5, True),
    ):
        over = {
            "workflow": f"tests.support.tiny_team:{workflow}",
            "algorithm.group_by": "turn",
            "pipeline.mode": mode,
            "pipeline.micro_batch_samples": micro_batch,
            "pipeline.early_start": early,
            "pipeline.steps": 3,
            "pipeline.deterministic": True,
        }
        handle = await house.client.submit(job(models, **over))
        record = await handle.wait(timeout=PATIENCE)
        assert record.state == "succeeded", record
        assert not (await handle.audit()).violations
        states = []
        for policy in ("checker", "solver"):
            directory = house.data_dir / handle.id / "state" / policy
            (path,) = directory.glob("v3-*/state.json")
            values = json.loads(path.read_text())
            states.append([values[part] for part in ("weights", "optimizer", "random")])
        found.append(states)
    assert found[0] == found[1] == found[2]
