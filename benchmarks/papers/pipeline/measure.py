"""Runs one row on a cluster and keeps what the figures are made of."""

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

# A row that takes this long hangs.
_ROW_SECONDS = 900.0
# Trainers let a finished job's policies go within seconds.
_FREE_SECONDS = 60.0


@dataclass(frozen=True)
class StepEnd:
    """A step's metrics, and when it had ended (seconds of the wall clock)."""

    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One row: its steps in their order and the spans of its engines and trainers.

    `cpu` is the share of the machine's cores in use, by whomever; `failure` says why there are no
    figures.
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
    """A cluster of real processes, simulated stand-ins of which write to `trace_dir`, and its
    client."""
    os.environ["TROUPE_REWARD_WORKERS"] = str(TOOL_PROCESSES)
    # All there from the start: what is compared is not how they scale.
    os.environ["TROUPE_REWARD_MIN_WORKERS"] = str(TOOL_PROCESSES)
    os.environ["TROUPE_SIMULATED_TRACE_DIR"] = str(trace_dir)
    settings = ClusterSettings(data_dir=data_dir, trainers=trainers, panel=False)
    async with (
        EmbeddedCluster(settings) as running,
        AsyncClient(running.state.orchestrator_address) as client,
    ):
        yield client


async def step_ends(handle: AsyncJobHandle) -> list[StepEnd]:
    """Wait for the job's end, well or not; its steps in their order."""
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
    """Wait until no heartbeat tells of an earlier row: it would change who is bound where."""
    async with asyncio.timeout(_FREE_SECONDS):
        while (await client.cluster()).bindings:  # noqa: ASYNC110 - heartbeats come each second
            await asyncio.sleep(0.5)


def _own(
    trainers: dict[str, list[TimelineSpan]],
    spans: list[TimelineSpan],
    steps: list[StepEnd],
    since: float,
) -> dict[str, list[TimelineSpan]]:
    """Every trainer by a short name, idle ones too; only what it did for this row."""
    lanes = sorted({span.lane for span in spans if span.what in ("train", "step")})
    until = steps[-1].at
    return {
        f"trainer {number}": [s for s in trainers.get(lane, ()) if since < s.end <= until]
        for number, lane in enumerate(lanes)
    }
