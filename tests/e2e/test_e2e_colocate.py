"""Engines and trainers of a real job take turns on the same devices, although processes die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_e2e_devices import given
from tests.support.interpreters import sglang_double
from tests.support.tiny_team import job
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_colocated_team_learns_although_processes_die(tmp_path: Path, models: Path) -> None:
    data_dir = tmp_path / "runs"
    settings = ClusterSettings(data_dir=data_dir, panel=False, devices="2xH100-80GB", colocate=True)
    server = {
        "kind": "sglang",
        "python": sglang_double(tmp_path),
        "update": "disk",
        "max_context": 128,
    }
    over = {
        "pipeline.mode": "sync",
        "pipeline.colocate": True,
        "pipeline.steps": 6,
        "policies.solver.engine": server,
        "checkpoint.every": 3,
        "evaluation.every": 3,
    }
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        handle = await client.submit(job(models, **over), "first")
        for step, service in ((1, "trainer-0"), (2, "rollout-0"), (3, "orchestrator")):
            async with asyncio.timeout(200):
                while (await handle.info()).step < step:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            found = next(one.pid for one in cluster.state.services if one.name == service)
            assert found is not None
            os.kill(found, signal.SIGKILL)
        record = await handle.wait(timeout=400)
        assert record.state == "succeeded", record
        assert record.versions == {"solver": 6, "checker": 6}
        assert record.after["team_success"] >= record.before["team_success"]
        assert not (await handle.audit()).violations

        me = psutil.Process(os.getpid())
        assert given(me, "services.rollout") == ["0,1"]
        assert given(me, "services.trainer") == ["0", "1"]
        rows = [json.loads(line) for line in (data_dir / "first" / "metrics.jsonl").open()]
        steps = [row for row in rows if "step/seconds" in row]
        assert len(steps) == 6
        for row in steps[1:]:
            assert row["colocate/sleep_seconds"] > 0
            assert row["colocate/wake_seconds"] > 0
