"""Two policies that train adapters over one base, through all services."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from troupe.client import AsyncJobHandle

STEPS = 12


@pytest.fixture(scope="module")
def base(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose frozen output layer can be sure of a letter: a random one is near uniform,
    whatever comes before them."""
    directory = tmp_path_factory.mktemp("base")
    shutil.copytree(models / "solver", directory, dirs_exist_ok=True)
    sharpen(directory)
    return directory


def sharpen(directory: Path, factor: float = 8.0) -> None:
    """Multiply the output layer of the model in `directory`."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    model.save_pretrained(directory)


async def started(house: House, base: Path) -> AsyncJobHandle:
    over: dict[str, Any] = {
        "pipeline.steps": STEPS,
        "pipeline.deterministic": True,
        "pipeline.mode": "micro_batch",
    }
    for policy in ("solver", "checker"):
        over[f"policies.{policy}.model"] = {"path": str(base)}
        over[f"policies.{policy}.lora"] = {"rank": 8, "alpha": 32}
        over[f"policies.{policy}.optimizer"] = {"lr": 0.02}
    return await house.client.submit(job(base.parent, **over))


def states(house: House, handle: AsyncJobHandle) -> dict[str, list[str]]:
    """Return the state from which a policy continues after the last step: checksums of all
    parts."""
    found = {}
    for policy in ("checker", "solver"):
        (path,) = (house.data_dir / handle.id / "state" / policy).glob(f"v{STEPS}-*/state.json")
        values = json.loads(path.read_text())
        found[policy] = [values[part] for part in ("weights", "optimizer", "random")]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_adapters_learn_and_end_with_the_same_bits_after_a_kill(
    house: House, base: Path
) -> None:
    quiet = await started(house, base)
    record = await quiet.wait(timeout=400)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": STEPS, "checker": STEPS}
    for policy in ("solver", "checker"):
        assert record.after[f"reward/{policy}"] > record.before[f"reward/{policy}"] + 0.2
        (checkpoint,) = [c for c in await quiet.checkpoints() if c.policy == policy]
        tensors = load_file(Path(checkpoint.path) / "adapter_model.safetensors")
        moved = [bool(t.any()) for name, t in tensors.items() if ".lora_B." in name]
        assert moved
        assert all(moved)
    assert not (await quiet.audit()).violations

    killed = await started(house, base)
    async with asyncio.timeout(300):
        while (await killed.info()).step < 2:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.2)
    pid = house.pid("trainer-0")
    os.kill(pid, signal.SIGKILL)
    assert (await killed.info()).step < STEPS
    record = await killed.wait(timeout=400)
    assert record.state == "succeeded", record
    assert house.pid("trainer-0") != pid
    assert states(house, killed) == states(house, quiet)
    assert not (await killed.audit()).violations
