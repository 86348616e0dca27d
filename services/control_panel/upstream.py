"""The panel's one connection: the orchestrator."""

from __future__ import annotations

from troupe.rpc import ClientSettings, connect
from troupe.v1 import orchestrator_pb2_grpc, reward_pb2_grpc


class Upstream:
    """Channel and stubs of the orchestrator at `address`; reconnects by itself."""

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = address
        self._channel = connect(address, settings)
        self.stub: orchestrator_pb2_grpc.OrchestratorAsyncStub = (
            orchestrator_pb2_grpc.OrchestratorStub(self._channel)  # type: ignore[assignment]
        )
        # The orchestrator answers the reward service's calls, too.
        self.functions: reward_pb2_grpc.RewardAsyncStub = reward_pb2_grpc.RewardStub(self._channel)  # type: ignore[assignment]

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)
