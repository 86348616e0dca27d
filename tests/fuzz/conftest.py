"""A cluster as `troupe up` leaves it, with its panel and one job that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.e2e.standing import Ended, Standing, ended, stand_up
from troupe.cluster.state import ServiceRecord, running_state
from troupe.rpc.tokens import local_token
from troupe.transfer.remote.process import OwnerProcess


@dataclass
class Target:
    """The services under attack."""

    standing: Standing
    owner: OwnerProcess
    job_id: str

    @property
    def services(self) -> list[ServiceRecord]:
        """The cluster's processes now."""
        state = running_state(self.standing.data_dir)
        assert state is not None, "the cluster is gone"
        return state.services

    @property
    def panel(self) -> str:
        """The panel's URL."""
        found = next(one for one in self.services if one.name == "control_panel")
        return f"http://{found.address}"

    @property
    def authorization(self) -> str:
        """The cluster's questions to its user."""
        token = local_token(self.standing.address)
        assert token is not None, "a cluster makes one"
        return f"Bearer {token.get_secret_value()}"

    def pids(self) -> dict[str, int | None]:
        """The process of each service, and of the owner of states."""
        return {one.name: one.pid for one in self.services} | {"transfer": self.owner.pid}

    def memory(self) -> dict[str, float]:
        """Resident MiB of each."""
        pids = self.pids().items()
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids}

    def train(self, name: str) -> Ended:
        """How a further job ends."""

        async def run() -> Ended:
            async with self.standing.client() as client:
                return await ended(await client.submit(self.standing.yaml(name=name), name))

        return asyncio.run(run())


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("target")
    states = tmp_path_factory.mktemp("states")
    with stand_up(directory, panel=True) as standing:
        owner = OwnerProcess([states], use_ucx=False)
        try:
            found = Target(standing, owner, "fuzzed-job")
            first = found.train(found.job_id)
            assert first.job.state == "succeeded", first
            assert httpx.get(f"{found.panel}/healthz").status_code == 200
            yield found
        finally:
            owner.close()
