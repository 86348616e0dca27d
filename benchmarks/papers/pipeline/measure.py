"""The run of one row on a cluster, with the data for its figures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.papers.pipeline.workload import TOOL_PROCESSES, TRAINERS, Mode
from testbed.timeline import TimelineSpan, read_spans
from troupe.client import AsyncClient, AsyncJobHandle, JobFailed, MetricsLogged
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.job import JobSpec

# Time limit of a row, in seconds.
_ROW_SECONDS = 900.0
# Trainers release a finished job's policies within seconds.
_FREE_SECONDS = 60.0


@dataclass(frozen=True)
class StepEnd:
    """A step's metrics and the wall-clock time of its end, in seconds."""

    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One row: its steps in order, and the spans of its engines and trainers.

    `cpu`: the share of the machine's cores in use by all programs; `failure`: the reason if there
    are no figures.
    """

    mode: Mode
    steps: list[StepEnd]
    engines: dict[str, list[TimelineSpan]]
    trainers: dict[str, list[TimelineSpan]]
    cpu: float = 0.0
    failure: str = ""


@asynccontextmanager
async def cluster(
    data_dir: Path, trace_dir: Path, trainers: int = TRAINERS
) -> AsyncIterator[AsyncClient]:
    """Yield the client of a cluster of real processes, whose simulated stand-ins write to
    `trace_dir`."""
    os.environ["TROUPE_REWARD_WORKERS"] = str(TOOL_PROCESSES)
    # All workers exist from the start, since scaling is not compared.
    os.environ["TROUPE_REWARD_MIN_WORKERS"] = str(TOOL_PROCESSES)
    os.environ["TROUPE_SIMULATED_TRACE_DIR"] = str(trace_dir)
    settings = ClusterSettings(data_dir=data_dir, trainers=trainers, panel=False)
    async with (
        EmbeddedCluster(settings) as running,
        AsyncClient(running.state.orchestrator_address) as client,
    ):
        yield client


async def step_ends(handle: AsyncJobHandle) -> list[StepEnd]:
    """Wait for the job's end, successful or not; return its steps in order."""
    return [
        StepEnd(event.at.timestamp(), event.values)
        async for event in handle.watch()
        if isinstance(event, MetricsLogged) and metric_names.STEP_SECONDS in event.values
    ]


async def run(client: AsyncClient, mode: Mode, spec: JobSpec, trace_dir: Path) -> Run:
    """Run the job to its end. A mode that fails is a row without figures."""
    await _trainers_free(client)
    handle = await client.submit(spec)
    psutil.cpu_percent()
    steps = await step_ends(handle)
    cpu = psutil.cpu_percent()
    try:
        await handle.result(timeout=_ROW_SECONDS)
    except JobFailed as error:
        return Run(mode, [], {}, {}, failure=str(error))
    spans = read_spans(trace_dir)
    since = steps[0].at - steps[0].values[metric_names.STEP_SECONDS] - 1
    engines: dict[str, list[TimelineSpan]] = {}
    trainers: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        if span.lane.startswith(handle.id):
            engines.setdefault(span.policy, []).append(span)
        elif span.what in ("train", "step") and span.end > since:
            trainers.setdefault(span.lane, []).append(span)
    return Run(mode, steps, engines, _own(trainers, spans, steps, since), cpu)


async def _trainers_free(client: AsyncClient) -> None:
    """Wait until no heartbeat reports bindings of an earlier row, which would change this row's."""
    async with asyncio.timeout(_FREE_SECONDS):
        while (await client.cluster()).bindings:  # noqa: ASYNC110 - heartbeats come each second
            await asyncio.sleep(0.5)


def _own(
    trainers: dict[str, list[TimelineSpan]],
    spans: list[TimelineSpan],
    steps: list[StepEnd],
    since: float,
) -> dict[str, list[TimelineSpan]]:
    """Return the spans of every trainer in this row by a short name, including idle ones."""
    lanes = sorted({span.lane for span in spans if span.what in ("train", "step")})
    until = steps[-1].at
    return {
        f"trainer {number}": [s for s in trainers.get(lane, ()) if since < s.end <= until]
        for number, lane in enumerate(lanes)
    }
