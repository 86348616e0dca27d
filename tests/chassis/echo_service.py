"""A service whose calls do what their request says; also a program, as real services are."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from services.chassis.app import run
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from troupe.rpc import NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc


class Echo(orchestrator_grpc.OrchestratorServicer):
    """`GetJob` and `SubmitJob` obey the job id; `WatchJob` never ends."""

    name = "troupe.v1.Orchestrator"

    def __init__(
        self, settings: ServiceSettings | None = None, telemetry: Telemetry | None = None
    ) -> None:
        self.runs = 0
        self.ended = 0
        self.cancelled = 0
        self.stopped = False
        self.metadata: dict[str, Any] = {}
        self.start_seconds = float(os.environ.get("ECHO_START_SECONDS", "0"))

    def add_to(self, server: grpc.aio.Server) -> None:
        orchestrator_grpc.add_OrchestratorServicer_to_server(self, server)

    async def start(self) -> None:
        await asyncio.sleep(self.start_seconds)
        if os.environ.get("ECHO_FAIL"):
            raise NotFound("no model here", field="model.path", remedy="Give a path that exists.")

    async def stop(self, grace: float) -> None:
        self.stopped = True

    async def GetJob(
        self, request: orchestrator_pb.GetJobRequest, context: Any
    ) -> orchestrator_pb.GetJobResponse:
        self.metadata = dict(context.invocation_metadata())
        return orchestrator_pb.GetJobResponse(job=await self._obey(request.job_id))

    async def SubmitJob(
        self, request: orchestrator_pb.SubmitJobRequest, context: Any
    ) -> orchestrator_pb.SubmitJobResponse:
        return orchestrator_pb.SubmitJobResponse(job=await self._obey(request.spec))

    async def WatchJob(
        self, request: orchestrator_pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.JobEvent]:
        try:
            for number in range(10**6):
                yield orchestrator_pb.JobEvent(event_id=str(number))
                if request.job_id == "raise" and number == 2:
                    raise NotFound("gone", field="job_id", value=request.job_id)
                await asyncio.sleep(0.01)
        finally:
            self.cancelled += 1

    async def _obey(self, order: str) -> orchestrator_pb.Job:
        self.runs += 1
        verb, _, argument = order.partition(" ")
        try:
            if verb == "sleep":
                await asyncio.sleep(float(argument))
            elif verb == "block":
                time.sleep(float(argument))  # noqa: ASYNC251 - the fault that is tested
            elif verb == "note":
                Path(argument).touch()  # noqa: ASYNC240 - a file of a test
                await asyncio.sleep(0.5)
            elif verb == "raise":
                raise ValueError(argument)
            elif verb == "starve":
                raise MemoryError
            elif verb == "exit":
                sys.exit(argument)
            elif verb == "group":
                raise BaseExceptionGroup("g", [SystemExit(1), KeyboardInterrupt()])
            elif verb == "thread":
                await asyncio.to_thread(sys.exit, argument)
            elif verb == "task":
                await asyncio.create_task(self._obey("exit of a task"))
            elif verb == "callback":
                loop = asyncio.get_running_loop()
                loop.call_soon(sys.exit, argument)
                loop.call_soon(loop.stop)
                await asyncio.sleep(0.05)
            elif verb == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            elif verb == "refuse":
                raise NotFound("no such job", field="job_id", value=argument, remedy="Look again.")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        size = int(argument) if verb == "big" else 0
        self.ended += 1
        return orchestrator_pb.Job(name=order[:50], step=self.runs, spec_json="x" * size)


if __name__ == "__main__":
    raise SystemExit(run(Echo, ServiceSettings))
