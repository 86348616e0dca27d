"""A team whose roles are adapters over one base, on one engine, through all services: embedded, or
on a real server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import House
from tests.e2e.test_e2e_lora import base as base
from tests.e2e.test_e2e_lora import sharpen
from tests.rollout.engines import real_server, real_vllm
from tests.support.tiny_team import job, make_model
from troupe.client import AsyncJobHandle
from troupe.client.records.cluster import Engine

ROLES = ("solver", "checker", "judge")
QUARTET = (*ROLES, "writer")
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
    seen, hosts = await played(house, handle)
    # One model: every engine that was ever reported stood on it.
    [host] = hosts
    assert host.startswith(f"{handle.id}.checker.0@")  # the first of the job's policies
    assert seen["reader"] == {0}
    await check_learnt(handle, ROLES, {"reader": 0})


def quartet(base: Path, kind: str, python: str) -> str:
    """Four roles that train adapters of their own ranks, on a server of a kind."""
    changes: dict[str, Any] = {
        "workflow": "tests.support.tiny_team:quartet",
        "pipeline.steps": STEPS,
        "pipeline.mode": "micro_batch",
        "agents": {},
        "policies": {},
    }
    for number, role in enumerate(QUARTET):
        changes[f"agents.{role}"] = {"policy": role, "sampling": {"max_new_tokens": 6}}
        changes[f"policies.{role}"] = {
            "model": {"path": str(base), "dtype": "float32"},
            "lora": {"rank": 4 + 4 * number, "alpha": 16 + 16 * number},
            "optimizer": {"lr": 0.02},
            "engine": {
                "kind": kind,
                "python": python,
                "launch": ["--lora-backend", "torch_native"] if kind == "sglang" else [],
                "max_context": 128,
                "max_running": 32,
                # deadline: a server imports for minutes on a busy machine
                "start_timeout_seconds": 1200,
            },
        }
    return job(base.parent, **changes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_four_roles_learn_on_one_real_server(kind: str, house: House, tmp_path: Path) -> None:
    python = {"sglang": real_server, "vllm": real_vllm}[kind].interpreter(tmp_path)
    # vLLM's kernels for CPUs have no heads of 16.
    base = make_model(tmp_path / "base", seed=1, head_dim=32)
    sharpen(base, 4.0)
    handle = await house.client.submit(quartet(base, kind, python))
    _, hosts = await played(house, handle)
    [host] = hosts
    assert host.startswith(f"{handle.id}.checker.0@")
    await check_learnt(handle, QUARTET, {})


async def played(house: House, handle: AsyncJobHandle) -> tuple[dict[str, set[int]], set[str]]:
    """Watch a job to its end: the versions of each policy's engines, and where engines stood."""
    seen: dict[str, set[int]] = defaultdict(set)
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
    await handle.wait(timeout=3000)
    watching.cancel()
    return seen, hosts


async def check_learnt(
    handle: AsyncJobHandle, roles: Sequence[str], others: dict[str, int]
) -> None:
    """Every role earns more than before and its checkpoint is its adapter; nothing was lost, came
    twice or had a wrong version."""
    record = await handle.info()
    assert record.state == "succeeded", record
    assert record.versions == {**dict.fromkeys(roles, STEPS), **others}
    for role in roles:
        assert record.after[f"reward/{role}"] > record.before[f"reward/{role}"] + 0.15
        (checkpoint,) = [c for c in await handle.checkpoints() if c.policy == role]
        tensors = load_file(Path(checkpoint.path) / "adapter_model.safetensors")
        assert all(bool(t.any()) for name, t in tensors.items() if ".lora_B." in name)
    audit = await handle.audit()
    assert not audit.violations
