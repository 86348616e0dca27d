"""Two policies learn in environments of the `verifiers` library that anybody can install.

One job mixes three: a taskset of PyPI, the same under the library's simulated user, who is the
second policy, and an environment of the library's older generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import House
from tests.support.own_python import RUBRICS, TASKSETS, own_python
from tests.support.tiny_team import make_model
from troupe.client import Notice

POLICY = {
    "optimizer": {"lr": 1e-3},
    "engine": {"max_running": 16, "max_context": 4096},
}


def job(models: Path, tasksets: str, rubrics: str) -> dict[str, Any]:
    marble = {"environment": "marble-v1", "python": tasksets}
    talk = {"id": "user-sim", "user": {"max_turns": 2}}
    poems = {"environment": "stardata.envs.constraint_gym", "python": rubrics}
    solver = {"roles": {"agent": "assistant"}}
    sampling = {"max_new_tokens": 12}
    return {
        "name": "verifiers",
        "tasks": {
            "mix": {
                "marbles": {"verifiers": {**marble, **solver}},
                "talks": {"verifiers": {**marble, "args": talk}, "weight": 2},
                "poems": {"verifiers": {**poems, **solver}, "held_out": 0.2},
            }
        },
        "agents": {
            "assistant": {"policy": "helper", "sampling": sampling},
            "user": {"policy": "people", "sampling": sampling},
        },
        "policies": {
            name: {**POLICY, "model": {"path": str(models / name)}} for name in ("helper", "people")
        },
        "pipeline": {"mode": "micro_batch", "steps": 2, "queries_per_step": 6, "group_size": 2},
        "evaluation": {"queries": 2},
        "limits": {"trajectory_seconds": 400, "turn_seconds": 200, "trajectory_retries": 1},
        "logging": {"tensorboard": False},
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_two_policies_learn_in_public_environments(house: House, tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_model(models / "helper", hidden=16, seed=1, positions=4096)
    make_model(models / "people", hidden=16, seed=2, positions=4096)
    tasksets = own_python(tmp_path, TASKSETS)
    rubrics = own_python(tmp_path, RUBRICS)

    handle = await house.client.submit(yaml.safe_dump(job(models, tasksets, rubrics)))
    record = await handle.wait(timeout=900)

    notes = [event.text async for event in handle.watch() if isinstance(event, Notice)]
    assert record.state == "succeeded", (record, notes)
    audit = await handle.audit()
    assert audit.passed, audit
    # All trajectories were played, and both policies trained on theirs.
    played = 2 * 6 * 2
    assert audit.trajectories_by_state.get("COMPLETED", 0) >= played, audit
    assert audit.trajectories_ended == audit.trajectories_admitted
    assert {one.policy: one.version for one in audit.versions} == {"helper": 2, "people": 2}
    metrics = {name for row in await handle.metrics() for name in row.values}
    names = {"trajectory/scored", "trajectory/assistant/scored", "trajectory/prosody_reward"}
    assert names <= metrics, sorted(metrics)
