"""A cluster that runs, as `troupe up` leaves it, for job after job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import tiny_team
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, AsyncJobHandle
from troupe.client.records.events import Notice
from troupe.client.records.jobs import Job
from troupe.cluster.daemon import start_detached, stop_running
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import running_state

ROOT = Path(__file__).resolve().parents[2]
BAD = "tests.support.bad_team:"


@dataclass
class Ended:
    """The end of a job, and its messages."""

    job: Job
    notices: list[str]
    handle: AsyncJobHandle

    @property
    def problem(self) -> Any:
        """Return its end, which must have a remedy."""
        assert self.job.problem is not None, self.job
        assert self.job.problem.remedy, self.job.problem
        return self.job.problem


@dataclass
class Standing:
    """A cluster in a separate process, two models, and a directory for users' code."""

    data_dir: Path
    models: Path
    code: Path

    @property
    def address(self) -> str:
        """The orchestrator's."""
        state = running_state(self.data_dir)
        assert state is not None, "the cluster is gone"
        return state.orchestrator_address

    def pid(self, service: str) -> int:
        """The process of a service now."""
        state = running_state(self.data_dir)
        assert state is not None, "the cluster is gone"
        found = next(s.pid for s in state.services if s.name == service)
        assert found is not None
        return found

    def kill(self, service: str) -> None:
        """Kill a service."""
        os.kill(self.pid(service), signal.SIGKILL)

    def yaml(self, workflow: str = BAD + "quick", **changes: Any) -> str:
        """A job of two steps of four queries; `changes` as in `tiny_team.job`."""
        small = {
            "pipeline.steps": 2,
            "pipeline.queries_per_step": 4,
            "pipeline.group_size": 2,
            "evaluation.queries": 0,
        }
        return tiny_team.job(self.models, workflow=workflow, **{**small, **changes})

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """A client of the cluster."""
        async with AsyncClient(self.address) as client:
            yield client

    async def run(self, text: str, job_id: str | None = None) -> Ended:
        """Submit a job and wait until it has ended."""
        async with self.client() as client:
            return await ended(await client.submit(text, job_id))

    def cli(self, *arguments: str) -> subprocess.Popen[str]:
        """The command line, on this cluster."""
        return run_cli(*arguments, "--cluster", self.address)


async def ended(handle: AsyncJobHandle, seconds: float = PATIENCE) -> Ended:
    """Wait until the job has ended."""
    job = await handle.wait(timeout=seconds)
    notices = [e.text async for e in handle.watch() if isinstance(e, Notice)]
    return Ended(job, notices, handle)


async def until_job(handle: AsyncJobHandle, good: Callable[[Job], bool]) -> Job:
    """Wait until the job is as it should be."""
    async with asyncio.timeout(PATIENCE):
        while not good(job := await handle.info()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
    return job


def final_states(data_dir: Path, job: Job) -> dict[str, list[Any]]:
    """Return the weights, optimizer and random generators, as checksums, from which each policy of
    an ended job would continue."""
    found = {}
    for policy, version in job.versions.items():
        (path,) = (data_dir / job.id / "state" / policy).glob(f"v{version}-*/state.json")
        values = json.loads(path.read_text())
        found[policy] = [values[part] for part in ("weights", "optimizer", "random")]
    return found


def run_cli(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """`troupe ...` as a user runs it."""
    return subprocess.Popen(
        [sys.executable, "-m", "troupe.client.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def stand_up(directory: Path, *, panel: bool = False, **more: Any) -> Iterator[Standing]:
    """A standing cluster in `directory`; its services import from `directory`/code, too.

    `more`: further settings of the cluster.
    """
    standing = Standing(directory / "runs", directory / "models", directory / "code")
    standing.code.mkdir()
    for number, (name, hidden) in enumerate({"solver": 32, "checker": 16}.items()):
        tiny_team.make_model(standing.models / name, hidden=hidden, seed=number)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{standing.code}"
    try:
        start_detached(ClusterSettings(data_dir=standing.data_dir, panel=panel, threads=1, **more))
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    try:
        yield standing
    finally:
        stop_running(standing.data_dir)
