"""Trainers that end when no job needs them, in a real cluster, between two jobs."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient
from troupe.client.cli.app import main
from troupe.cluster import ClusterSettings, EmbeddedCluster


@pytest.mark.slow
async def test_trainers_end_between_jobs_and_are_back_for_the_next(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ClusterSettings(data_dir=tmp_path, panel=False, trainers=2, trainer_idle_seconds=1.0)
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):

        async def parked() -> list[str]:
            deadline = time.monotonic() + PATIENCE
            while True:
                states = {one.name: one.state for one in cluster.state.services}
                found = [name for name in states if states[name] == "parked"]
                if len(found) == 2 or time.monotonic() > deadline:
                    return found
                await asyncio.sleep(0.1)

        assert await parked() == ["trainer-0", "trainer-1"]
        for _ in range(2):
            handle = await client.submit(job(models, **{"pipeline.steps": 2}))
            record = await handle.wait(timeout=PATIENCE)
            assert record.state == "succeeded", record
            assert not (await handle.audit()).violations
            assert await parked() == ["trainer-0", "trainer-1"]
        # The values that an autoscaler reads elsewhere.
        orchestrator = next(s for s in cluster.state.services if s.name == "orchestrator")
        url = f"http://{orchestrator.metrics_address}/metrics"
        assert "\ntroupe_trainers_wanted 0.0\n" in await asyncio.to_thread(_read, url)
        # An idle worker is not a faulty one.
        assert await asyncio.to_thread(main, ["status", "--data-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("parked") == 2


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return str(answer.read(), "utf-8")
