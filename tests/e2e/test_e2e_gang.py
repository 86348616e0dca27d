"""One policy of a team on a gang of two gloo ranks, through all services."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.state.training_state import StateStore
from tests.e2e.conftest import House
from tests.support.tiny_team import job
from troupe.client import AsyncJobHandle

STEPS = 2
RANK = "services.trainer.gang.rank"


async def trained(
    house: House, models: Path, gang: int, *, kill: bool = False, **changes: Any
) -> Mapping[str, torch.Tensor]:
    """Return the solver's weights after the last step, and its critic's."""
    over: dict[str, Any] = {"pipeline.mode": "sync", "pipeline.steps": STEPS, **changes}
    over["policies.solver.trainer"] = {"gang": gang}
    # A step far above Adam's amplification of rounding.
    over["policies.solver.optimizer"] = {"lr": 1e-3, "eps": 1e-3}
    over["policies.checker.trainable"] = False
    handle = await house.client.submit(job(models, **over))
    if kill:
        await kill_a_rank(house.pid("trainer-0"), handle)
    record = await handle.wait(timeout=250)
    assert record.state == "succeeded", record
    assert record.versions["solver"] == STEPS
    assert not (await handle.audit()).violations
    (checkpoint,) = [one for one in await handle.checkpoints() if one.policy == "solver"]
    state = StateStore(house.data_dir, handle.id, "solver").load(STEPS)
    assert state.path is not None
    assert len(list(state.path.glob("shard-*"))) == (gang if gang > 1 else 0)
    if "policies.solver.lora" in over:
        saved = load_file(f"{checkpoint.path}/adapter_model.safetensors")
        assert len(saved) == len(state.weights)
        assert all(bool(tensor.any()) for tensor in saved.values()), "B began as zeros"
    else:
        saved = load_file(f"{checkpoint.path}/model.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in state.weights.items())
    critic = {n: t for n, t in state.moments.items() if n.startswith("critic/weight/")}
    assert bool(critic) == ("algorithm" in over)
    return state.weights | critic


async def kill_a_rank(trainer: int, handle: AsyncJobHandle) -> None:
    """Once a step is committed and the next one is under way."""
    async with asyncio.timeout(200):
        while (await handle.info()).step < 1:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
    below = psutil.Process(trainer).children(recursive=True)
    ranks = [process for process in below if process.cmdline()[-1:] == [RANK]]
    (late,) = [process for process in ranks if process.environ().get("RANK") == "1"]
    os.kill(late.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_gang_learns_what_one_device_does_although_a_rank_is_killed(
    house: House, models: Path
) -> None:
    one = await trained(house, models, 1)
    two = await trained(house, models, 2, kill=True)
    assert set(one) == set(two)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [
        {"policies.solver.lora": {"rank": 4, "alpha": 16}},
        {"algorithm": {"advantage": "gae", "critic": {"optimizer": {"lr": 1e-3, "eps": 1e-3}}}},
    ],
    ids=["lora", "critic"],
)
async def test_adapters_and_critics_in_a_gang_outlive_a_rank(
    house: House, models: Path, changes: dict[str, Any]
) -> None:
    """The state is written behind the steps, so that a rank's death costs those since the first."""
    one = await trained(house, models, 1, **changes)
    two = await trained(house, models, 2, kill=True, state={"every": 4}, **changes)
    assert set(one) == set(two)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
