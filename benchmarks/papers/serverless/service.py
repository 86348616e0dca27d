"""A reward service in a separate process, as started by the embedded cluster, and calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.command import end
from troupe.rpc import connect, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

WORKLOAD: Final = "benchmarks.papers.serverless.short_rewards"
_START_SECONDS: Final = 60.0


class Service:
    """A running service."""

    def __init__(self, stub: RewardAsyncStub) -> None:
        self.stub = stub

    async def register(self, name: str) -> None:
        """Register a function of the workload."""
        spec = reward_pb.FunctionSpec(
            name=name, entrypoint=f"{WORKLOAD}:{name}", timeout_seconds=60, kind="reward"
        )
        await self.stub.RegisterFunction(
            reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        )

    async def invoke(self, name: str, arguments_json: str = "{}") -> reward_pb.InvokeResponse:
        """Make one call."""
        return await self.stub.Invoke(
            reward_pb.InvokeRequest(
                invocation_id=new_id(), name=name, arguments_json=arguments_json
            )
        )

    async def batch(self, name: str, arguments: Sequence[str]) -> list[reward_pb.InvokeResponse]:
        """Make many calls in one message. Raises RuntimeError if one fails."""
        request = reward_pb.InvokeBatchRequest(
            name=name,
            calls=[
                reward_pb.BatchCall(invocation_id=new_id(), arguments_json=one) for one in arguments
            ],
        )
        responses = list((await self.stub.InvokeBatch(request)).responses)
        for response in responses:
            if response.HasField("error"):
                raise RuntimeError(f"{name}: {response.error.message}")
        return responses

    async def is_empty(self) -> None:
        """Wait until there are no workers."""
        async with asyncio.timeout(_START_SECONDS):
            while (await self.pool()).workers:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)

    async def pool(self) -> reward_pb.PoolStatus:
        """Return the status of its workers."""
        return (await self.stub.ListFunctions(reward_pb.ListFunctionsRequest())).pool


@contextlib.asynccontextmanager
async def started(directory: Path, name: str, **settings: float) -> AsyncIterator[Service]:
    """Run a service with `TROUPE_REWARD_*` settings as long as the context lasts."""
    with _process(directory, name, settings) as address:
        async with connect(address) as channel:
            yield Service(RewardStub(channel))


@contextlib.contextmanager
def _process(directory: Path, name: str, settings: Mapping[str, float]) -> Iterator[str]:
    ports = directory / f"{name}.ports"
    env = {
        **os.environ,
        "TROUPE_PORT": "0",
        "TROUPE_METRICS_PORT": "0",
        "TROUPE_PORT_FILE": str(ports),
        "TROUPE_LOG_LEVEL": "warning",
        **{f"TROUPE_REWARD_{key.upper()}": str(value) for key, value in settings.items()},
    }
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.reward"], stdout=log, stderr=log, env=env
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not ports.exists() or not ports.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((directory / f"{name}.log").read_text())
            time.sleep(0.05)
        yield f"127.0.0.1:{ports.read_text().split()[0]}"
    finally:
        end(process)
