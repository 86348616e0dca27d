"""The run of one row on a cluster, with its steps and its policies' backlogs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.papers.balancing.workload import HEARTBEAT_SECONDS, Row
from benchmarks.papers.pipeline.measure import StepEnd, step_ends
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.job import JobSpec
from troupe.rpc import connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub

# Time limit of a row, in seconds.
_ROW_SECONDS = 600.0


@dataclass(frozen=True)
class Look:
    """Backlog per engine of each policy at one moment (seconds of the wall clock)."""

    at: float
    pressures: dict[str, float]

    @property
    def disparity(self) -> float:
        """The difference between the largest and the smallest."""
        return max(self.pressures.values()) - min(self.pressures.values())


@dataclass(frozen=True)
class Run:
    """One row: its steps in order, and its backlogs. `cpu`: the share of the machine's cores in use
    by all programs."""

    row: Row
    steps: list[StepEnd]
    looks: list[Look]
    cpu: float

    @property
    def seconds(self) -> float:
        """Seconds per step, the median without the first."""
        return statistics.median(one.values[metric_names.STEP_SECONDS] for one in self.steps[1:])

    @property
    def measured(self) -> list[Look]:
        """The observations during the steps that count."""
        return [look for look in self.looks if self.steps[0].at <= look.at <= self.steps[-1].at]

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all steps."""
        return sum(one.values.get(metric, 0.0) for one in self.steps)


class Bench:
    """A cluster, with its client and the rollout service's stub."""

    def __init__(self, client: AsyncClient, stub: Any) -> None:
        self._client = client
        self._stub = stub

    async def run(self, row: Row, spec: JobSpec) -> Run:
        """Run the job to its end. Raises `JobFailed`."""
        handle = await self._client.submit(spec)
        looks: list[Look] = []
        watch = asyncio.create_task(self._watch(handle.id, looks))
        psutil.cpu_percent()
        try:
            async with asyncio.timeout(_ROW_SECONDS):
                steps = await step_ends(handle)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        cpu = psutil.cpu_percent()
        await handle.result(timeout=_ROW_SECONDS)
        return Run(row, steps, looks, cpu)

    async def _watch(self, job_id: str, looks: list[Look]) -> None:
        while True:
            picture = await self._stub.GetCluster(orchestrator_pb.GetClusterRequest())
            pressures = {
                load.policy: (load.waiting + load.in_flight) / max(1, load.engines)
                for load in picture.loads
                if load.job_id == job_id
            }
            if pressures:
                looks.append(Look(time.time(), pressures))
            await asyncio.sleep(HEARTBEAT_SECONDS)


@asynccontextmanager
async def bench(data_dir: Path) -> AsyncIterator[Bench]:
    """Yield a cluster of real processes: one rollout worker, one trainer."""
    settings = ClusterSettings(
        data_dir=data_dir,
        panel=False,
        environment={"TROUPE_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)},
    )
    async with EmbeddedCluster(settings) as running:
        address = running.state.orchestrator_address
        channel = connect(address)
        try:
            async with AsyncClient(address) as client:
                yield Bench(client, OrchestratorStub(channel))
        finally:
            await channel.close(None)
