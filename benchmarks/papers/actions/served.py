"""A reward service's process, its functions and calls, and the priorities in a real-time class
(`chrt -r`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import psutil

from benchmarks.command import end, scratch
from benchmarks.papers.actions.functions import PACED_DIR
from testbed.simulator.trace import SHELL
from testbed.twin.actions import SimulatedAction
from troupe.rpc import ClientSettings, connect, new_id
from troupe.scheduling.elastic.order import SHORTEST, Order
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

_START_SECONDS = 60.0
_CALL_SECONDS = 600.0
# Pause for other work on the machine after each batch.
_PAUSE_SECONDS: Final = 5.0
# Duration of warm-up calls, long enough that each worker gets one.
_NOTHING = SimulatedAction(SHELL, 1, 1, 0.02, 0.0)


@dataclass(frozen=True)
class Ran:
    """One action: seconds from request to answer, running seconds according to the service and to
    the function, and its cores."""

    act: float
    run: float
    own: float
    cores: int


class Reward:
    """A running service."""

    def __init__(
        self, channel: grpc.aio.Channel, process: psutil.Process, workers: int, paced: bool
    ) -> None:
        self._stub: RewardAsyncStub = RewardStub(channel)
        self._process = process
        self._workers = workers
        self._entrypoint = f"benchmarks.papers.actions.functions:{'paced' if paced else 'burnt'}"

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the service itself, without its workers."""
        times = self._process.cpu_times()
        return times.user + times.system

    async def register(
        self,
        name: str,
        lowest: int,
        highest: int,
        fraction: float = 0.0,
        *,
        kind: str = "tool",
        told: bool = False,
    ) -> None:
        """Register a function that takes `lowest` to `highest` cores, and have every worker import
        it. `told`: it declares a call's duration on one core by its arguments."""
        spec = reward_pb.FunctionSpec(
            name=name,
            version="1",
            entrypoint=self._entrypoint,
            timeout_seconds=_CALL_SECONDS,
            cores=lowest,
            max_cores=highest if highest > lowest else 0,
            parallel_fraction=fraction,
            kind=kind,
            seconds_per={"serial": 1.0, "parallel": 1.0} if told else {},
        )
        await self._stub.RegisterFunction(
            reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        )
        await asyncio.gather(*(self.run(name, _NOTHING) for _ in range(2 * self._workers)))

    async def run(self, name: str, call: SimulatedAction, who: tuple[str, str] = ("", "")) -> Ran:
        """Run an action for `who`, job and trajectory."""
        asked = time.perf_counter()
        response = await self._stub.Invoke(
            reward_pb.InvokeRequest(
                invocation_id=new_id(),
                name=name,
                version="1",
                arguments_json=json.dumps({"serial": call.serial, "parallel": call.parallel}),
                job_id=who[0],
                trajectory_id=who[1],
                query_id=call.query,
            ),
            timeout=_CALL_SECONDS,
        )
        if response.HasField("error"):
            raise RuntimeError(f"{name}: {response.error.message}")
        own = float(json.loads(response.result_json))
        return Ran(time.perf_counter() - asked, response.run_seconds, own, response.cores)


@contextlib.asynccontextmanager
async def started(
    cores: int, workers: int, *, paced: bool, order: Order = SHORTEST
) -> AsyncIterator[Reward]:
    """Run a warm service with this number of cores and workers."""
    with _process(cores, workers, paced, order) as (process, address):
        channel = connect(address, ClientSettings())
        try:
            reward = Reward(channel, process, workers, paced)
            await reward.register(SHELL, 1, 1)
            go_ahead(process)
            yield reward
        finally:
            await channel.close(None)


@contextlib.contextmanager
def _process(
    cores: int, workers: int, paced: bool, order: Order
) -> Iterator[tuple[psutil.Process, str]]:
    module = "benchmarks.papers.actions.paced_service" if paced else "services.reward"
    with scratch() as directory, contextlib.ExitStack() as stack:
        ports, log = directory / "ports", directory / "service.log"
        env = {
            "TROUPE_PORT": "0",
            "TROUPE_PORT_FILE": str(ports),
            "TROUPE_REWARD_WORKERS": str(workers),
            "TROUPE_REWARD_MIN_WORKERS": str(workers),
            "TROUPE_REWARD_CORES": str(cores),
            "TROUPE_REWARD_ORDER": order,
            PACED_DIR: str(directory),
            "TROUPE_REWARD_ENVIRONMENT": PACED_DIR,
        }
        out = stack.enter_context(log.open("wb"))
        command = [sys.executable, "-m", module]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env)
        stack.callback(end, process)
        deadline = time.monotonic() + _START_SECONDS
        while not (ports.exists() and ports.read_text().strip()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the reward service did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield psutil.Process(process.pid), f"127.0.0.1:{ports.read_text().split()[0]}"


def go_ahead(service: psutil.Process) -> None:
    """Give the service and this process precedence over busy workers, as without a real-time class,
    in which a process keeps its core until its time slice ends."""
    if not _real_time():
        return
    priority = os.sched_param(os.sched_getparam(0).sched_priority + 1)
    for process in (service, psutil.Process()):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread.id, os.SCHED_RR, priority)


@contextlib.contextmanager
def modestly() -> Iterator[None]:
    """Leave the real-time class: parts that measure only their own CPU time, or no time, need
    none."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if _real_time():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


async def breathe() -> None:
    """Leave the machine to others for a while."""
    if _real_time():
        await asyncio.sleep(_PAUSE_SECONDS)


def _real_time() -> bool:
    return os.sched_getscheduler(0) == os.SCHED_RR
