"""An orchestrator with a real Redis, a real experience store, and workers that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.support.cluster import Cluster


@pytest.fixture
async def cluster(redis_url: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A started cluster with one rollout and one trainer worker. What another test left unfinished
    would go on here, with this test's workers: there are no jobs."""
    async with Redis.from_url(redis_url) as redis:
        await redis.flushall()
    cluster = Cluster(redis_url, tmp_path)
    await cluster.open()
    await cluster.add_rollout()
    await cluster.add_trainer()
    yield cluster
    await cluster.close()
