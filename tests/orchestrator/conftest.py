"""An orchestrator with a real Redis, a real experience store, and workers that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture
async def cluster(empty_redis: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A started cluster with one rollout and one trainer worker."""
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    await cluster.add_rollout()
    await cluster.add_trainer()
    yield cluster
    await cluster.close()
