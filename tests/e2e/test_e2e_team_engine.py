"""A team whose roles are adapters over one base, on one embedded engine, through all services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import House
from tests.e2e.test_e2e_lora import base as base
from tests.support.tiny_team import job
from troupe.client.records.cluster import Engine

ROLES = ("solver", "checker", "judge")
STEPS = 10


def team(base: Path) -> str:
    """Three roles that train adapters of their own ranks, and one that is the bare base."""
    changes: dict[str, Any] = {
        "workflow": "tests.support.tiny_team:trio",
        "pipeline.steps": STEPS,
        "pipeline.mode": "micro_batch",
    }
    for number, role in enumerate((*ROLES, "reader")):
        changes[f"agents.{role}"] = {"policy": role, "sampling": {"max_new_tokens": 6}}
        policy: dict[str, Any] = {
            "model": {"path": str(base)},
            "engine": {"max_context": 128, "share": "auto"},
        }
        if role == "reader":
            policy["trainable"] = False
        else:
            policy["lora"] = {"rank": 4 + 4 * number, "alpha": 32}
            policy["optimizer"] = {"lr": 0.02}
        changes[f"policies.{role}"] = policy
    return job(base.parent, **changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_roles_learn_on_one_engine_each_by_its_own_versions(house: House, base: Path) -> None:
    handle = await house.client.submit(team(base))
    seen: dict[str, set[int]] = {role: set() for role in (*ROLES, "reader")}
    hosts: set[str] = set()

    async def watch() -> None:
        while True:
            engines: tuple[Engine, ...] = (await house.client.cluster()).engines
            for engine in engines:
                hosts.add(engine.host)
                if engine.version is not None:
                    seen[engine.policy].add(engine.version)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    record = await handle.wait(timeout=600)
    watching.cancel()
    assert record.state == "succeeded", record
    assert record.versions == {**dict.fromkeys(ROLES, STEPS), "reader": 0}
    # One model: every engine that was ever reported stood on it.
    [host] = hosts
    assert host.startswith(f"{handle.id}.checker.0@")  # the first of the job's policies
    assert seen["reader"] == {0}
    for role in ROLES:
        assert len(seen[role]) > 1
        assert record.after[f"reward/{role}"] > record.before[f"reward/{role}"] + 0.15
        (checkpoint,) = [c for c in await handle.checkpoints() if c.policy == role]
        tensors = load_file(Path(checkpoint.path) / "adapter_model.safetensors")
        assert all(bool(t.any()) for name, t in tensors.items() if ".lora_B." in name)
    audit = await handle.audit()
    assert not audit.violations
