"""A rollout service for each test, and its neighbours as processes, which all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.rollout import job_setup, jobs
from services.rollout.serving import supervision
from tests.rollout import plays, worlds
from tests.rollout.house import House, MakeEngine, open_house
from tests.rollout.processes import ServiceProcess


@pytest.fixture(autouse=True, scope="module")
def _fresh(no_old_jobs: None) -> None:
    """Each module begins without the jobs of others."""


@pytest.fixture(scope="session")
def store_process(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """A real experience store; keep apart by job ids. It outlives these tests: in a database of
    its own it does not look after the jobs of all others."""
    directory = tmp_path_factory.mktemp("store")
    own = redis_url.removesuffix("/0") + "/1"
    process = ServiceProcess("experience_store", directory, {"TROUPE_REDIS_URL": own})
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def reward_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A real reward service with two worker processes."""
    process = ServiceProcess("reward", tmp_path_factory.mktemp("reward"))
    process.start()
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def _settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs begin and end here by the hundreds, in a process with the modules of the whole suite:
    each would thaw and walk all of them (half a second). Who tests just that has its own."""
    monkeypatch.setattr(jobs, "settle", lambda: None)
    monkeypatch.setattr(job_setup, "exempt_new", lambda: None)


@pytest.fixture
def workshop() -> MakeEngine | None:
    """The factory of `house`'s engines; None: the service's own."""
    return None


@pytest.fixture
async def house(
    tmp_path: Path, store_process: ServiceProcess, workshop: MakeEngine | None
) -> AsyncIterator[House]:
    """A rollout service with an experience store, and plays that have not begun."""
    plays.RELEASED = asyncio.Event()
    worlds.reset()
    async with open_house(tmp_path, store=store_process.address, make=workshop) as house:
        yield house


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that were lost are started again at once."""
    monkeypatch.setattr(supervision, "RESTART_PAUSE_SECONDS", 0.05)


@pytest.fixture
async def rewarded_house(
    tmp_path: Path, store_process: ServiceProcess, reward_process: ServiceProcess
) -> AsyncIterator[House]:
    """A rollout service that has an experience store and a reward service."""
    neighbours = {"store": store_process.address, "reward": reward_process.address}
    async with open_house(tmp_path, **neighbours) as house:
        yield house
