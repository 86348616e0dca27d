"""A job that ends the orchestrator whenever it is launched costs three orchestrators, no more."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe.rpc import Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


class Process:
    """The orchestrator of a cluster as a separate process, which can die."""

    def __init__(self, cluster: Cluster, modules: Path) -> None:
        settings = cluster.settings
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(modules), *sys.path]),
            "TROUPE_HOST": "127.0.0.1",
            "TROUPE_PORT": str(settings.port),
            "TROUPE_REDIS_URL": settings.redis_url,
            "TROUPE_DATA_DIR": str(settings.data_dir),
            "TROUPE_EXPERIENCE_STORE_ADDRESS": settings.experience_store_address,
            "TROUPE_REWARD_ADDRESS": settings.reward_address,
            "TROUPE_METRICS_PORT": "0",
            "TROUPE_SURVIVAL_SECONDS": "4",
        }
        self._log = (modules / "log").open("ab")
        self.process: Any = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.orchestrator"),
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )

    async def kept(self, until: Any) -> int:
        """Bring it back whenever it dies, as a supervisor does, until `until()` is so. Returns how
        often it died."""
        deaths = 0
        async with asyncio.timeout(2 * PATIENCE):
            done = asyncio.ensure_future(until())
            while not done.done():
                ended = asyncio.ensure_future(self.process.wait())
                await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    deaths += 1
                    await self.start()
                ended.cancel()
            done.result()
        return deaths


async def until_state(cluster: Cluster, job_id: str, state: common_pb.JobState.ValueType) -> None:
    """Wait until the job is in the state, however long an orchestrator takes to come back."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(Unavailable):
                await cluster.wait(job_id, [state])
                return


@pytest.mark.slow
async def test_a_job_that_kills_the_orchestrator_is_set_aside(
    cluster: Cluster, tmp_path: Path
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "wandb.py").write_text("import os\ndef init(**_): os._exit(9)\n")
    # Long enough to be there all the time.
    cluster.rollouts[0].script.seconds = 1000
    good = await cluster.submit(job_yaml("good", policies=["solver"]))
    await cluster.until(good, lambda job: job.state == common_pb.JOB_STATE_RUNNING)
    await cluster.stop_orchestrator()
    process = Process(cluster, modules)
    await process.start()
    try:
        await until_state(cluster, good, common_pb.JOB_STATE_RUNNING)
        bad = await cluster.submit(job_yaml("bad", logging__wandb_project="p"), job_id="bad")
        deaths = await process.kept(lambda: until_state(cluster, bad, common_pb.JOB_STATE_FAILED))
        jobs = {
            job.job_id: job
            for job in (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
        }
        assert jobs[bad].state == common_pb.JOB_STATE_FAILED
        assert jobs[bad].problem.kind == "orchestrator_keeps_dying"
        assert "died 3 times" in jobs[bad].problem.message
        assert deaths == 3
        await until_state(cluster, good, common_pb.JOB_STATE_RUNNING)
    finally:
        process.process.terminate()
        await process.process.wait()


async def test_an_orchestrator_that_stops_in_order_counts_for_nothing(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    for _ in range(4):
        await cluster.until(job_id, lambda job: job.state == common_pb.JOB_STATE_RUNNING)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    await cluster.until(job_id, lambda job: job.state == common_pb.JOB_STATE_RUNNING)
