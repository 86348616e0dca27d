"""The Reward servicer: validate, run once per invocation id, answer."""

from __future__ import annotations

from typing import Any, Literal

import grpc
import structlog
from pydantic import Field

from services.chassis.idempotency import IdempotencyCache
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.reward.cpu import CoreManager, choose_backend, usable_cores
from services.reward.fence import Fence
from services.reward.groups import Groups, open_groups
from services.reward.registry import Registry
from services.reward.runtime import Runtime
from services.reward.slot import Slot
from troupe.rpc import InvalidArgument
from troupe.v1 import reward_pb2 as pb
from troupe.v1 import reward_pb2_grpc

log = structlog.get_logger("troupe.reward")


class RewardSettings(ServiceSettings):
    """What the reward service needs to know besides."""

    reward_workers: int = Field(default=2, gt=0)
    """Worker processes, that is, calls that run at once."""
    reward_cores: int = Field(default=0, ge=0)
    """Cores that calls hold while they run: handed out anew for every call, as many as pay.
    0: none are handed out, and a call takes a worker process and nothing else."""
    reward_core_backend: Literal["auto", "cgroup2", "cgroup1", "affinity"] = "auto"
    """How the kernel is told; auto: the first of them that works here."""
    reward_import_seconds: float = Field(default=120, gt=0)
    """How long a worker may take to import a function's module."""
    reward_max_queued: int = Field(default=10_000, gt=0)
    """Invocations that may wait; more are asked to come again."""


class RewardService(reward_pb2_grpc.RewardServicer):
    """Functions by name and version, run in worker processes."""

    name = "troupe.v1.Reward"

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        groups = open_groups()
        cores = _core_manager(settings, groups)
        self._fence = fence = Fence(groups) if groups is not None else None
        slots = [
            Slot(settings.reward_import_seconds, f"worker-{i}", cores, fence)
            for i in range(settings.reward_workers)
        ]
        self._registry = Registry(settings.reward_cores)
        self._runtime = Runtime(
            slots, telemetry, max_queued=settings.reward_max_queued, cores=cores
        )
        self._once = IdempotencyCache(settings.idempotency_seconds)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""
        reward_pb2_grpc.add_RewardServicer_to_server(self, server)

    async def start(self) -> None:
        """Start the workers."""
        await self._runtime.start()

    async def stop(self, grace: float) -> None:
        """Kill the workers."""
        await self._runtime.stop()
        if self._fence is not None:
            self._fence.close()
        await self._once.close()

    async def RegisterFunction(
        self, request: pb.RegisterFunctionRequest, context: Any
    ) -> pb.RegisterFunctionResponse:
        """Make a function known."""
        self._registry.register(request.function)
        return pb.RegisterFunctionResponse()

    async def ListFunctions(
        self, request: pb.ListFunctionsRequest, context: Any
    ) -> pb.ListFunctionsResponse:
        """All functions with their counts."""
        return pb.ListFunctionsResponse(functions=[f.status() for f in self._registry])

    async def Invoke(self, request: pb.InvokeRequest, context: Any) -> pb.InvokeResponse:
        """Run a function once per invocation id, however often it is asked."""
        if not request.invocation_id:
            raise InvalidArgument(
                "is empty",
                field="invocation_id",
                remedy="Make an id for each invocation, so that a repeated call runs once.",
            )
        function = self._registry.find(request.name, request.version)
        return await self._once.run(
            request.invocation_id,
            request.SerializeToString(deterministic=True),
            lambda: self._runtime.invoke(
                request.invocation_id, function, request.arguments_json, request.priority
            ),
            abandoned=lambda: self._runtime.abandon(request.invocation_id),
        )

    async def CancelInvocation(
        self, request: pb.CancelInvocationRequest, context: Any
    ) -> pb.CancelInvocationResponse:
        """End an invocation that waits or runs."""
        return pb.CancelInvocationResponse(cancelled=self._runtime.cancel(request.invocation_id))


def _core_manager(settings: RewardSettings, groups: Groups | None) -> CoreManager | None:
    if not settings.reward_cores:
        return None
    try:
        nodes = usable_cores(settings.reward_cores)
        manager = CoreManager(nodes, choose_backend(groups, settings.reward_core_backend))
    except (ValueError, OSError) as error:
        raise InvalidArgument(
            str(error),
            field="TROUPE_REWARD_CORES",
            value=settings.reward_cores,
            remedy="Name as many cores as this process may use, and a backend that works here "
            "(TROUPE_REWARD_CORE_BACKEND=auto).",
        ) from error
    log.info("cores are handed out", cores=settings.reward_cores, backend=manager.kind)
    return manager
