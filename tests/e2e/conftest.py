"""A whole embedded cluster: real processes, real Redis, real gradient steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tiny_team import make_model
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster


@dataclass
class House:
    """A running cluster, a client of it, and where its files are."""

    cluster: EmbeddedCluster
    client: AsyncClient
    data_dir: Path

    def pid(self, service: str) -> int:
        """The process id of a service now."""
        found = next(s.pid for s in self.cluster.state.services if s.name == service)
        assert found is not None
        return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of two sizes, in `solver` and `checker`."""
    directory = tmp_path_factory.mktemp("models")
    make_model(directory / "solver", hidden=32, seed=1)
    make_model(directory / "checker", hidden=16, seed=2)
    return directory


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A separate cluster for one test."""
    settings = ClusterSettings(data_dir=tmp_path, panel=False)
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        yield House(cluster, client, tmp_path)
