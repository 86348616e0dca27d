"""A rollout service in a separate process, and trajectories through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.command import end
from benchmarks.rollout.workload import JOB, publish
from troupe.job import JobSpec
from troupe.rpc import connect, new_id
from troupe.states import TRAJECTORY, is_terminal
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc

_START_SECONDS: Final = 300.0
_RUN_SECONDS: Final = 600.0
_IDLE_SECONDS: Final = 10.0
# Seconds after turns for the last events, and for connections to close.
_SETTLE_SECONDS: Final = 4.0
# Evaluations need no experience store, and heartbeats have no receiver.
_NOBODY: Final = "127.0.0.1:9"


@dataclass
class Run:
    """The figures of a set of trajectories. `added`: seconds per turn beyond its model time."""

    seconds: float = 0.0
    tokens: float = 0.0
    turns: float = 0.0
    prompt_tokens: float = 0.0
    cpu_seconds: float = 0.0
    most_rss: int = 0
    most_in_flight: int = 0
    added: list[float] = field(default_factory=list)


@contextlib.contextmanager
def service(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a service; yield its address and process. Logs go to `directory`."""
    port_file = directory / "rollout.port"
    port_file.unlink(missing_ok=True)
    environment = os.environ | {
        "TROUPE_PORT_FILE": str(port_file),
        "TROUPE_TRANSFER_DIR": str(directory / "transfer"),
        "TROUPE_EXPERIENCE_STORE_ADDRESS": _NOBODY,
        "TROUPE_REWARD_ADDRESS": _NOBODY,
        "TROUPE_ORCHESTRATOR_ADDRESS": _NOBODY,
        "TROUPE_PARENT_PID": str(os.getpid()),
        "TROUPE_DRAIN_SECONDS": "1",
    }
    log = directory / "rollout.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.rollout"], env=environment, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (port_file.exists() and port_file.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"rollout does not serve:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield f"127.0.0.1:{port_file.read_text().split()[0]}", psutil.Process(process.pid)
    finally:
        end(process)


@contextlib.asynccontextmanager
async def prepared(address: str, directory: Path, job: JobSpec) -> AsyncIterator[Any]:
    """Yield calls to the service, with the job's engines up."""
    channel = connect(address)
    try:
        stub = rollout_grpc.RolloutStub(channel)
        request = rollout_pb.PrepareJobRequest(
            request_id=new_id("prepare"),
            job_id=JOB,
            spec_json=job.model_dump_json(),
            weights=[publish(directory, job)],
        )
        await stub.PrepareJob(request, timeout=_START_SECONDS)
        yield stub
        await stub.ReleaseJob(
            rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=JOB)
        )
    finally:
        await channel.close(None)


async def run(stub: Any, process: psutil.Process, first: int, count: int) -> Run:
    """Run `count` trajectories from query `first` on, and sum up their figures."""
    tickets = [
        rollout_pb.Ticket(
            query_id=f"h{first + n}",
            trajectory_id=f"h{first + n}-t0",
            split="held_out",
            index=first + n,
            seed=first + n,
            purpose=rollout_pb.Ticket.PURPOSE_EVALUATE,
        )
        for n in range(count)
    ]
    request = rollout_pb.RunQueriesRequest(
        request_id=new_id("run"), job_id=JOB, step=0, tickets=tickets
    )
    found = Run()
    in_flight = 0
    cpu = _cpu_seconds(process)
    began = time.perf_counter()
    async for event in stub.RunQueries(request, timeout=_RUN_SECONDS):
        if event.state == common_pb.TRAJECTORY_STATE_RUNNING:
            in_flight += 1
        if not is_terminal(TRAJECTORY, event.state):
            continue
        if event.state != common_pb.TRAJECTORY_STATE_COMPLETED:
            raise RuntimeError(f"{event.trajectory_id} failed: {event.reason}")
        if in_flight > found.most_in_flight:
            found.most_in_flight = in_flight
        if in_flight % 64 == 0 or in_flight == found.most_in_flight:
            found.most_rss = max(found.most_rss, process.memory_info().rss)
        in_flight -= 1
        found.tokens += event.metrics["response_tokens"]
        found.turns += event.metrics["turns"]
        found.prompt_tokens += event.metrics["prompt_tokens"]
        found.added += [v for name, v in event.metrics.items() if name.startswith("added_")]
    found.seconds = time.perf_counter() - began
    found.cpu_seconds = _cpu_seconds(process) - cpu
    return found


async def idle_rate(process: psutil.Process) -> float:
    """Return the CPU seconds per second of a service with engines and without trajectories."""
    await asyncio.sleep(_SETTLE_SECONDS)
    cpu, began = _cpu_seconds(process), time.perf_counter()
    await asyncio.sleep(_IDLE_SECONDS)
    return (_cpu_seconds(process) - cpu) / (time.perf_counter() - began)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
