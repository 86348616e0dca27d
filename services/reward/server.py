"""The gRPC servicer of the reward service: functions are registered and invoked here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from services.chassis.telemetry import Telemetry
from services.reward.call import fitted
from services.reward.function import FunctionRegistry, listening
from services.reward.host import LocalHost
from services.reward.hosts.link import AttachedHosts, HostFleet
from services.reward.quota import open_quotas
from services.reward.runtime import Invocations, Runtime
from services.reward.settings import RewardSettings
from troupe.functions.sources import SourceStore
from troupe.scheduling.elastic import Discipline
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc

__all__ = ["RewardService", "RewardSettings"]

# Events that a stream may hold; one that is read too slowly misses output.
_EVENTS: Final = 1000


class RewardService(reward_grpc.RewardServicer):
    """Registers functions by name and version, and runs their calls in worker processes."""

    name = "troupe.v1.Reward"

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        self._local = LocalHost(settings, telemetry)
        self._sources = SourceStore()
        shared = settings.redis_url if "redis_url" in settings.model_fields_set else None
        self._quotas = open_quotas(
            settings.reward_quotas,
            shared,
            settings.worker_id,
            lambda: self._runtime.dispatcher.dispatch(),
        )
        self._runtime = Runtime(
            [self._local.host],
            telemetry,
            max_queued=settings.reward_max_queued,
            quotas=self._quotas,
            discipline=Discipline(settings.reward_order, patience=settings.reward_patience_seconds),
        )
        self._fleet = HostFleet(
            self._local.host,
            self._runtime.dispatcher,
            self._quotas,
            expected_seconds=settings.reward_host_expected_seconds,
        )
        self._registry = FunctionRegistry(self._sources, self._fleet.check)
        self._hosts = AttachedHosts(
            self._sources,
            self._fleet.attach,
            self._fleet.detach,
            beat_seconds=settings.reward_host_beat_seconds,
        )
        self._most_bytes = settings.max_message_mib << 20
        self._invocations = Invocations(
            self._registry, self._runtime, self._local.sandboxes, settings
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""
        reward_grpc.add_RewardServicer_to_server(self, server)

    async def start(self) -> None:
        """Start the workers. Raises `FailedPrecondition` if Redis cannot keep the quotas."""
        if self._quotas is not None:
            await self._quotas.start()
        await self._runtime.dispatcher.start()

    async def stop(self, grace: float) -> None:
        """Kill the workers."""
        await self._runtime.stop()
        if self._quotas is not None:
            await self._quotas.stop()
        await self._local.sandboxes.stop()
        self._local.close()
        await self._invocations.close()
        self._sources.close()

    async def UploadSource(
        self, request: reward_pb.UploadSourceRequest, context: Any
    ) -> reward_pb.UploadSourceResponse:
        """Keep files of code by their hash."""
        sha256 = await asyncio.to_thread(self._sources.put, request.files)
        return reward_pb.UploadSourceResponse(sha256=sha256)

    async def RegisterFunction(
        self, request: reward_pb.RegisterFunctionRequest, context: Any
    ) -> reward_pb.RegisterFunctionResponse:
        """Register a function."""
        self._local.sandboxes.check(request.function)
        function = self._registry.register(request.function)
        self._runtime.dispatcher.warm_up(function)
        return reward_pb.RegisterFunctionResponse()

    async def DeleteFunction(
        self, request: reward_pb.DeleteFunctionRequest, context: Any
    ) -> reward_pb.DeleteFunctionResponse:
        """Delete a function, and cancel its calls."""
        function = self._registry.delete(request.name, request.version)
        if function is not None:
            self._runtime.forget(function)
        return reward_pb.DeleteFunctionResponse(deleted=function is not None)

    async def ListFunctions(
        self, request: reward_pb.ListFunctionsRequest, context: Any
    ) -> reward_pb.ListFunctionsResponse:
        """Return all functions with their counts."""
        return reward_pb.ListFunctionsResponse(
            functions=[
                self._runtime.pool.function_status(f, self._local.confinement(f.profile))
                for f in self._registry
            ],
            pool=self._runtime.pool.status(),
        )

    async def Invoke(
        self, request: reward_pb.InvokeRequest, context: Any
    ) -> reward_pb.InvokeResponse:
        """Run a function, once per invocation id however often it is sent."""
        return await self._invocations.invoke(request, context.time_remaining())

    async def InvokeBatch(
        self, request: reward_pb.InvokeBatchRequest, context: Any
    ) -> reward_pb.InvokeBatchResponse:
        """Run many calls of a function; all of them are queued, or none.

        Results that one message cannot hold fail alone, as KIND_RESULT_TOO_LARGE.
        """
        responses = await self._invocations.batch(request, context.time_remaining())
        return reward_pb.InvokeBatchResponse(responses=fitted(responses, self._most_bytes))

    async def InvokeStream(
        self, request: reward_pb.InvokeRequest, context: Any
    ) -> AsyncIterator[reward_pb.InvocationEvent]:
        """Run a function, and stream its events, the last of which is the outcome."""
        events: asyncio.Queue[reward_pb.InvocationEvent | None] = asyncio.Queue()

        def listener(event: reward_pb.InvocationEvent) -> None:
            if events.qsize() < _EVENTS or event.WhichOneof("event") != "output":
                events.put_nowait(event)

        with self._runtime.watch(request.invocation_id, listener):
            invoked = asyncio.create_task(self.Invoke(request, context))
            invoked.add_done_callback(lambda _: events.put_nowait(None))
            try:
                while (event := await events.get()) is not None:
                    yield event
            finally:
                invoked.cancel()
            yield reward_pb.InvocationEvent(outcome=await invoked)

    async def AttachHost(
        self, request_iterator: AsyncIterator[reward_pb.HostMessage], context: Any
    ) -> AsyncIterator[reward_pb.HostCommand]:
        """Attach a host, which runs calls for as long as the stream lasts."""
        async with aclosing(self._hosts.serve(request_iterator)) as commands:
            async for command in commands:
                yield command

    async def ListHosts(
        self, request: reward_pb.ListHostsRequest, context: Any
    ) -> reward_pb.ListHostsResponse:
        """Return the hosts that are attached."""
        return reward_pb.ListHostsResponse(hosts=self._hosts.list())

    async def CancelInvocation(
        self, request: reward_pb.CancelInvocationRequest, context: Any
    ) -> reward_pb.CancelInvocationResponse:
        """End an invocation that waits or runs."""
        cancelled = self._invocations.cancel(request.invocation_id)
        return reward_pb.CancelInvocationResponse(cancelled=cancelled)

    async def CloseTrajectory(
        self, request: reward_pb.CloseTrajectoryRequest, context: Any
    ) -> reward_pb.CloseTrajectoryResponse:
        """End the stateful sandboxes of a trajectory."""
        self._runtime.discipline.closed(request.job_id, request.trajectory_id)
        closed = self._local.sandboxes.close(request.job_id, request.trajectory_id)
        return reward_pb.CloseTrajectoryResponse(closed=closed)

    async def ReadLogs(
        self, request: reward_pb.ReadLogsRequest, context: Any
    ) -> AsyncIterator[reward_pb.LogLine]:
        """Yield the last lines that a function's calls printed, and with `follow` those to come."""

        def wanted(line: reward_pb.LogLine) -> bool:
            return request.job_id in ("", line.job_id) and request.invocation_id in (
                "",
                line.invocation_id,
            )

        functions = self._registry.versions(request.name, request.version)
        with listening(functions) as coming:
            kept = sorted(
                (line for f in functions for line in f.logs.kept if wanted(line)),
                key=lambda line: line.seconds,
            )
            for line in kept[-request.lines :]:
                yield line
            while request.follow and (following := await coming.get()) is not None:
                if wanted(following):
                    yield following
