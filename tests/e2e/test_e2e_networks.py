"""Small networks train on the embedded cluster: the same bits after a crash, and at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.e2e.conftest import House
from tests.e2e.standing import run_cli
from tests.support.waiting import PATIENCE
from troupe.client import AsyncJobHandle
from troupe.networks.exported import ExportedNetwork

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "particles"


def _job(name: str, **pipeline: Any) -> str:
    """One of the example's jobs, cut down."""
    spec = yaml.safe_load((EXAMPLES / name).read_text())
    spec["environment"]["copies"] = 8
    spec["pipeline"] |= {"steps": 6, "queries_per_step": 3, **pipeline}
    spec["evaluation"] |= {"queries": 2, "every": 0}
    spec["logging"] = {"tensorboard": False}
    return yaml.safe_dump(spec)


async def _end(house: House, handle: AsyncJobHandle) -> list[str]:
    """Return the parts of the last state, once the job has succeeded."""
    record = await handle.wait(timeout=200)
    assert record.state == "succeeded", record
    assert record.versions == {"team": 6}
    audit = await handle.audit()
    assert not audit.violations, audit
    (path,) = (house.data_dir / handle.id / "state" / "team").glob("v6-*/state.json")
    values = json.loads(path.read_text())
    return [values[part] for part in ("weights", "optimizer", "random")]


async def _rows(house: House, handle: AsyncJobHandle) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (house.data_dir / handle.id / "metrics.jsonl").open()]
    return [row for row in rows if "step/seconds" in row]


async def test_a_killed_trainer_changes_no_bit_and_async_keeps_its_bound(
    house: House, tmp_path: Path
) -> None:
    quiet = await house.client.submit(_job("two_step.yaml", mode="sync", deterministic=True))
    wanted = await _end(house, quiet)
    exported = ExportedNetwork.read(await quiet.export("team", tmp_path / "exported"))
    returns = exported.actor(exported.play(copies=2)).sample(0, explore=False).returns
    assert returns[0, 0] in (0, 1, 7, 8), "what the two games pay"
    address, told = house.cluster.state.orchestrator_address, tmp_path / "told"
    cli = run_cli("export", quiet.id, str(told), "--cluster", address)
    out, err = await asyncio.to_thread(cli.communicate, timeout=PATIENCE)
    assert (cli.returncode, err) == (0, ""), out
    again = ExportedNetwork.read(told)
    assert again.weights.keys() == exported.weights.keys()
    assert all(torch.equal(again.weights[name], exported.weights[name]) for name in again.weights)

    handle = await house.client.submit(_job("two_step.yaml", mode="sync", deterministic=True))
    async with asyncio.timeout(PATIENCE):
        while (await handle.info()).versions.get("team", 0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    os.kill(house.pid("trainer-0"), signal.SIGKILL)
    assert await _end(house, handle) == wanted

    together = await house.client.submit(_job("job.yaml", mode="async", alpha=1))
    await _end(house, together)
    rows = await _rows(house, together)
    assert len(rows) == 6
    for row in rows:
        assert row["team/staleness/max"] <= 1
        assert row["team/environment_steps"] == 3 * 8 * 25
        assert row["trajectory/environment_steps_per_second"] > 0
