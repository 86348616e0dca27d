"""The example games train on the embedded cluster: turn-based, and simultaneously in child
processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from examples.games.model import make_model
from tests.e2e.conftest import House

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "examples" / "games" / "job.yaml"


def _job(model: Path, workflow: str, *, own_policies: bool) -> str:
    """The example's job, cut down to two steps."""
    spec = yaml.safe_load(JOB.read_text())
    spec["workflow"] = workflow
    spec["policies"]["player"]["model"]["path"] = str(model)
    spec["pipeline"] |= {"steps": 2, "queries_per_step": 4, "group_size": 8}
    spec["evaluation"] = {"queries": 4}
    spec["logging"] = {"tensorboard": False}
    if own_policies:
        spec["policies"]["other"] = spec["policies"]["player"]
        spec["agents"]["bob"]["policy"] = "other"
    return yaml.safe_dump(spec)


@pytest.mark.parametrize(
    ("workflow", "own_policies"),
    [
        ("examples.games.kuhn:workflow", False),
        ("examples.games.stag_hunt:hosted_workflow", True),
    ],
)
async def test_a_game_trains(
    house: House, tmp_path: Path, workflow: str, own_policies: bool
) -> None:
    model = make_model(tmp_path / "model")
    handle = await house.client.submit(_job(model, workflow, own_policies=own_policies))
    record = await handle.wait(timeout=300)
    assert record.state == "succeeded", record
    policies = ("player", "other") if own_policies else ("player",)
    assert record.versions == dict.fromkeys(policies, 2)

    rows = [json.loads(line) for line in (house.data_dir / handle.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "step/seconds" in row]
    assert len(steps) == 2
    for row in steps:
        logged = {name.rpartition("/")[2]: value for name, value in row.items()}
        assert logged["game_steps"] >= (2 if not own_policies else 3)
        assert logged["illegal_moves"] > 0  # it is a random model
    audit = await handle.audit()
    assert not audit.violations, audit
