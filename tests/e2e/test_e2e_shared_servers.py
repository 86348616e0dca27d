"""Attached servers that three rollout workers share while a team learns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import House
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.tiny_team import job
from troupe.client import AsyncClient, MetricsLogged
from troupe.cluster import ClusterSettings, EmbeddedCluster

STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_keeper_that_dies_is_replaced_and_nothing_is_lost(
    tmp_path: Path, models: Path
) -> None:
    async with AsyncExitStack() as stack:
        fakes: dict[str, list[FakeSglang]] = {}
        urls: dict[str, list[str]] = {}
        for policy, count in (("solver", 2), ("checker", 1)):
            config = json.loads((models / policy / "config.json").read_text())
            fakes[policy] = [FakeSglang(config) for _ in range(count)]
            urls[policy] = [await stack.enter_async_context(serve(one)) for one in fakes[policy]]
        settings = ClusterSettings(data_dir=tmp_path / "data", rollouts=3, panel=False)
        cluster = await stack.enter_async_context(EmbeddedCluster(settings))
        client = await stack.enter_async_context(AsyncClient(cluster.state.orchestrator_address))
        engines = {
            f"policies.{policy}.engine": {
                "kind": "sglang",
                "urls": urls[policy],
                "max_context": 128,
                "start_timeout_seconds": 120,
            }
            for policy in urls
        }
        small = {
            "pipeline.steps": STEPS,
            "pipeline.queries_per_step": 6,
            "pipeline.group_size": 4,
            "evaluation.queries": 0,
            # The servers compute in this process, which may be one of many.
            "limits": {"trajectory_seconds": 300, "turn_seconds": 200, "step_seconds": 500},
        }
        handle = await client.submit(job(models, **{**small, **engines}))
        steps = 0
        async with asyncio.timeout(600):
            async for event in handle.watch():
                steps += isinstance(event, MetricsLogged) and "step/seconds" in event.values
                if steps == 2:
                    break
        # Every server has a keeper of its own: this one kept one of them.
        os.kill(House(cluster, client, tmp_path).pid("rollout-0"), signal.SIGKILL)
        record = await handle.wait(timeout=600)
        assert record.state == "succeeded", record
        audit = await handle.audit()
    assert audit.passed, audit
    for one in audit.policies:
        assert one.version == STEPS
        # The servers hold the newest version: who keeps them now has brought them there.
        assert {fake.version for fake in fakes[one.policy]} == {str(STEPS)}
        assert all(fake.bodies for fake in fakes[one.policy])
