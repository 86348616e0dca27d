"""The panel's one connection: the orchestrator."""

from __future__ import annotations

from troupe.rpc.channel import connect
from troupe.v1 import orchestrator_pb2_grpc


class Upstream:
    """Channel and stub of the orchestrator at `address`; reconnects by itself."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address)
        self.stub: orchestrator_pb2_grpc.OrchestratorAsyncStub = (
            orchestrator_pb2_grpc.OrchestratorStub(self._channel)  # type: ignore[assignment]
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
