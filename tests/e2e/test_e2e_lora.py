"""Two policies that train adapters over one base, through all services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from troupe.client import AsyncJobHandle

STEPS = 6


async def started(house: House, models: Path) -> AsyncJobHandle:
    over: dict[str, Any] = {
        "pipeline.steps": STEPS,
        "pipeline.deterministic": True,
        "pipeline.mode": "micro_batch",
    }
    for policy in ("solver", "checker"):
        over[f"policies.{policy}.model"] = {"path": str(models / "solver")}
        over[f"policies.{policy}.lora"] = {"rank": 8, "alpha": 32}
        over[f"policies.{policy}.optimizer"] = {"lr": 0.02}
    return await house.client.submit(job(models, **over))


def states(house: House, handle: AsyncJobHandle) -> dict[str, list[str]]:
    """What a policy goes on from after the last step: checksums of all parts."""
    found = {}
    for policy in ("checker", "solver"):
        (path,) = (house.data_dir / handle.id / "state" / policy).glob(f"v{STEPS}-*/state.json")
        values = json.loads(path.read_text())
        found[policy] = [values[part] for part in ("weights", "optimizer", "random")]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_adapters_learn_and_end_with_the_same_bits_after_a_kill(
    house: House, models: Path
) -> None:
    quiet = await started(house, models)
    record = await quiet.wait(timeout=400)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": STEPS, "checker": STEPS}
    assert record.after != record.before
    for policy in ("solver", "checker"):
        (checkpoint,) = [c for c in await quiet.checkpoints() if c.policy == policy]
        tensors = load_file(Path(checkpoint.path) / "adapter_model.safetensors")
        moved = [bool(t.any()) for name, t in tensors.items() if ".lora_B." in name]
        assert moved
        assert all(moved)
    assert not (await quiet.audit()).violations

    killed = await started(house, models)
    async with asyncio.timeout(300):
        while (await killed.info()).step < 2:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.2)
    os.kill(house.pid("trainer-0"), signal.SIGKILL)
    record = await killed.wait(timeout=400)
    assert record.state == "succeeded", record
    assert states(house, killed) == states(house, quiet)
    assert not (await killed.audit()).violations
