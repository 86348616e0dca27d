"""Trainer processes that run only while policies want them (FlexMARL, agent-centric resources).

The orchestrator's binder takes policies without work off their trainers, and says how many trainers
are wanted. Here their processes, and the memory that each has before it holds anything, follow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import SecretStr

from troupe.cluster.child import ChildState
from troupe.cluster.supervisor import Supervisor
from troupe.rpc import NO_RETRY, ClientSettings, TroupeError, connect
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import orchestrator_pb2_grpc as rpc

_POLL_SECONDS: Final = 1.0
_ASK_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Demand:
    """What the binder says."""

    # Trainers that would be of use.
    wanted: int
    # Policies that trainers hold or keep for others.
    bound: int


class ElasticTrainers:
    """Parks the children `names` of a supervisor when nobody wants them; brings back who is."""

    def __init__(
        self,
        supervisor: Supervisor,
        names: Sequence[str],
        demand: Callable[[], Awaitable[Demand]],
        idle_seconds: float,
    ) -> None:
        """`idle_seconds`: for how long nobody must have wanted any. `demand` may raise
        `TroupeError`: who cannot be asked changes nothing."""
        self._supervisor = supervisor
        self._names = list(names)
        self._demand = demand
        self._idle_seconds = idle_seconds

    async def run(self) -> None:
        """Until it is cancelled."""
        idle_since: float | None = None
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                demand = await self._demand()
            except TroupeError:
                idle_since = None
                continue
            if demand.wanted or demand.bound:
                idle_since = None
                await self._bring(demand.wanted)
                continue
            now = time.monotonic()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since >= self._idle_seconds:
                await self._park()

    async def _bring(self, wanted: int) -> None:
        parked = self._in(ChildState.PARKED)
        missing = wanted - (len(self._names) - len(parked))
        await asyncio.gather(*map(self._supervisor.unpark, parked[: max(0, missing)]))

    async def _park(self) -> None:
        # One that is being brought back after its death is let come first.
        await asyncio.gather(*map(self._supervisor.park, self._in(ChildState.SERVING)))

    def _in(self, state: ChildState) -> list[str]:
        return [name for name in self._names if self._supervisor.children[name].state == state]


class Binder:
    """The orchestrator's binder, as it may be asked."""

    def __init__(self, address: str, token: SecretStr) -> None:
        """`address`: of the orchestrator of this machine; `token`: that of its cluster."""
        own: dict[str, Any] = {
            "deadline_seconds": _ASK_SECONDS,
            "retry": NO_RETRY,
            # TLS is for what leaves the machine (`Child`).
            **dict.fromkeys(("tls_ca", "tls_cert", "tls_key")),
            "token": token,
        }
        settings = ClientSettings.of_environment().model_copy(update=own)
        self._channel = connect(address, settings)
        self._stub: rpc.OrchestratorAsyncStub = rpc.OrchestratorStub(self._channel)

    async def demand(self) -> Demand:
        """What it says now. Raises `TroupeError`."""
        reply = await self._stub.GetCluster(pb.GetClusterRequest())
        return Demand(reply.wanted_trainers, len(reply.bindings))

    async def close(self) -> None:
        """End what is asked."""
        await self._channel.close(0)
