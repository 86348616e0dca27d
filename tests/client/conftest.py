"""Fixtures of the client tests: an orchestrator double on its own thread or in the loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.client.project import JOB_YAML, Project
from tests.support.fake_orchestrator import FakeOrchestrator, S, serve
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, Client
from troupe.client.cli.app import main
from troupe.cluster.daemon import stop_running
from troupe.cluster.state import (
    ClusterLock,
    ClusterState,
    created_at,
    running_state,
    write_state,
)
from troupe.rpc import ClientSettings, RetryPolicy

Run = Callable[..., tuple[int, str, str]]

QUICK = ClientSettings(deadline_seconds=PATIENCE, retry=RetryPolicy(initial_backoff=0.01, seed=1))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No test talks to a cluster that happens to run on this machine."""
    for name in ("TROUPE_ORCHESTRATOR_ADDRESS", "TROUPE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def job_yaml() -> str:
    return JOB_YAML


@pytest.fixture
async def fake() -> AsyncIterator[FakeOrchestrator]:
    """The double, served in the test's own loop; `fake.address` says where."""
    double = FakeOrchestrator()
    async with serve(double) as address:
        double.address = address  # type: ignore[attr-defined]
        yield double


@pytest.fixture
async def client(fake: FakeOrchestrator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fake.address, settings=QUICK) as connected:  # type: ignore[attr-defined]
        yield connected


@dataclass
class Stage:
    """A double on a separate thread, for blocking clients and the CLI."""

    fake: FakeOrchestrator
    address: str
    loop: asyncio.AbstractEventLoop

    def do(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine of the double in its loop."""

        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def play(self, script: Callable[[FakeOrchestrator], Awaitable[Any]]) -> None:
        """Start `script(fake)` in the double's loop and return at once."""

        async def run() -> Any:
            return await script(self.fake)

        asyncio.run_coroutine_threadsafe(run(), self.loop)


@pytest.fixture
def stage() -> Iterator[Stage]:
    ready: threading.Event = threading.Event()
    made: list[Stage] = []

    async def run() -> None:
        double = FakeOrchestrator()
        async with serve(double) as address:
            made.append(Stage(double, address, asyncio.get_running_loop()))
            over.append(asyncio.Event())
            ready.set()
            await over[0].wait()

    over: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    yield made[0]
    made[0].loop.call_soon_threadsafe(over[0].set)
    thread.join(PATIENCE)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def cluster(stage: Stage, job_yaml: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A double with a job `mine` that runs."""
    monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", stage.address)
    with Client() as client:
        client.submit(job_yaml, job_id="mine")
    stage.do(stage.fake.move("mine", S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING))
    stage.do(stage.fake.step("mine", 1, reward__mean=0.5, reward__solver__mean=0.5))
    return stage


@pytest.fixture
def running(cluster: Stage, tmp_path: Path) -> Iterator[Path]:
    """The directory of a cluster that this process supervises."""
    place = tmp_path / "running"
    lock = ClusterLock(place)
    lock.acquire()
    created = created_at(os.getpid())
    assert created is not None
    state = ClusterState(
        cluster_id="c",
        phase="ready",
        supervisor_pid=os.getpid(),
        supervisor_created=created,
        started_at=time.time(),
        data_dir=place,
        transfer_dir=place,
        redis_url="",
        orchestrator_address=cluster.address,
    )
    write_state(state)
    yield place
    lock.release()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A user's directory, whose cluster is stopped at the end."""
    project = Project(tmp_path / "project")
    yield project
    if running_state(project.runs):
        stop_running(project.runs)
