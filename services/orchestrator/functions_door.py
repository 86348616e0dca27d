"""The orchestrator as the door to functions: it answers the reward service's own calls, so that
users have one address, and nothing that they deployed is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from services.orchestrator.functions import Functions
from troupe.rpc import Unimplemented
from troupe.v1 import reward_pb2 as pb
from troupe.v1 import reward_pb2_grpc

# Of a call that set no deadline.
_INVOKE_SECONDS: Final = 3600.0


class FunctionDoor(reward_pb2_grpc.RewardServicer):
    """`troupe.v1.Reward` for users. What only workers and hosts call is not answered here."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    async def UploadSource(
        self, request: pb.UploadSourceRequest, context: Any
    ) -> pb.UploadSourceResponse:
        return await self._functions.upload(request)

    async def RegisterFunction(
        self, request: pb.RegisterFunctionRequest, context: Any
    ) -> pb.RegisterFunctionResponse:
        await self._functions.deploy(request.function)
        return pb.RegisterFunctionResponse()

    async def DeleteFunction(
        self, request: pb.DeleteFunctionRequest, context: Any
    ) -> pb.DeleteFunctionResponse:
        deleted = await self._functions.delete(request.name, request.version)
        return pb.DeleteFunctionResponse(deleted=deleted)

    async def ListFunctions(
        self, request: pb.ListFunctionsRequest, context: Any
    ) -> pb.ListFunctionsResponse:
        """Those of jobs, too, whose names begin with their job's."""
        return await self._functions.list()

    async def ListHosts(self, request: pb.ListHostsRequest, context: Any) -> pb.ListHostsResponse:
        return await self._functions.reward.ListHosts(request)

    async def Invoke(self, request: pb.InvokeRequest, context: Any) -> pb.InvokeResponse:
        timeout = context.time_remaining() or _INVOKE_SECONDS
        return await self._functions.call(
            request, lambda: self._functions.reward.Invoke(request, timeout=timeout)
        )

    async def InvokeBatch(
        self, request: pb.InvokeBatchRequest, context: Any
    ) -> pb.InvokeBatchResponse:
        timeout = context.time_remaining() or _INVOKE_SECONDS
        return await self._functions.call(
            request, lambda: self._functions.reward.InvokeBatch(request, timeout=timeout)
        )

    async def InvokeStream(
        self, request: pb.InvokeRequest, context: Any
    ) -> AsyncIterator[pb.InvocationEvent]:
        # Of what the service has forgotten there is nothing to stream.
        await self._functions.tell(await self._functions.named(request))
        async for event in _relayed(self._functions.reward.InvokeStream(request)):
            yield event

    async def CancelInvocation(
        self, request: pb.CancelInvocationRequest, context: Any
    ) -> pb.CancelInvocationResponse:
        return await self._functions.reward.CancelInvocation(request)

    async def CloseTrajectory(
        self, request: pb.CloseTrajectoryRequest, context: Any
    ) -> pb.CloseTrajectoryResponse:
        return await self._functions.reward.CloseTrajectory(request)

    async def ReadLogs(
        self, request: pb.ReadLogsRequest, context: Any
    ) -> AsyncIterator[pb.LogLine]:
        async for line in _relayed(self._functions.reward.ReadLogs(request)):
            yield line

    async def AttachHost(self, request: Any, context: Any) -> AsyncIterator[pb.HostCommand]:
        raise Unimplemented(
            "hosts attach to the reward service itself",
            field="address",
            remedy="Point the host at TROUPE_REWARD_ADDRESS of the cluster.",
        )
        yield  # a stream, like the service's


async def _relayed(call: Any) -> AsyncIterator[Any]:
    """What a stream of the service says; it is cancelled when nobody listens any more."""
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()
