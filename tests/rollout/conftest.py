"""The neighbours of the rollout service as processes, shared by all its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.rollout import job_setup, jobs
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
    for module in (jobs, job_setup):
        monkeypatch.setattr(module, "settle", lambda: None)
