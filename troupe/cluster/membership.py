"""A node's membership in a cluster: the node joins by name, reports its devices, and leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr

from troupe.cluster.inventory import by_device
from troupe.cluster.layout import HeadAddresses
from troupe.cluster.settings import ClusterSettings
from troupe.devices import NODE_PROTOCOL, Device, device_use
from troupe.rpc import NO_RETRY, ClientSettings, connect
from troupe.rpc.addresses import is_loopback_host
from troupe.rpc.errors import DeadlineExceeded, TroupeError, Unavailable
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

_log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0
# Seconds to wait for the head when the node leaves.
_LEAVE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class TrainerDemand:
    """The demand for trainers that the orchestrator reports."""

    # Number of trainers with which no policy would wait.
    wanted: int
    # Number of policies bound to trainers.
    bound: int


class NodeMembership:
    """A node's entry at its head, with its devices and their use, kept up until the node leaves."""

    def __init__(
        self,
        settings: ClusterSettings,
        orchestrator: str,
        token: SecretStr | None,
        devices: Sequence[Device],
        processes: Mapping[str, Sequence[Device]],
        tell: Callable[[str], None],
    ) -> None:
        """Report to the head's `orchestrator` ("host:port"). `processes` has the devices of each
        process; `tell` is called with events for people."""
        update: dict[str, object] = {"retry": NO_RETRY, "deadline_seconds": _TIMEOUT_SECONDS}
        if token is not None:
            update["token"] = token
        if is_loopback_host(settings.host):
            update |= dict.fromkeys(("tls_ca", "tls_cert", "tls_key"))
        client = ClientSettings.of_environment().model_copy(update=update)
        self._orchestrator = orchestrator
        self._channel = connect(orchestrator, client)
        self._stub: orchestrator_grpc.OrchestratorAsyncStub = orchestrator_grpc.OrchestratorStub(
            self._channel
        )
        self._name = settings.name
        self._host = settings.reachable_host
        self._instance = secrets.token_hex(8)
        self._devices = devices
        self._process = by_device(processes)
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    async def join(self, seconds: float) -> HeadAddresses:
        """Join, waiting up to `seconds` for a head that does not answer yet.

        Raises `DeadlineExceeded`, or the head's refusal: `AlreadyExists` if another live node has
        the name, `FailedPrecondition` for another protocol, `Unauthenticated` for another token.
        """
        deadline = time.monotonic() + seconds
        told = False
        while True:
            try:
                answer = await self._stub.JoinNode(await self._request())
            except Unavailable as error:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"no head answers at {self._orchestrator} within {seconds:g} s: {error}",
                        field="head",
                        value=self._orchestrator,
                        remedy="Start `troupe head` there, or correct --head HOST:PORT.",
                    ) from error
                if not told:
                    self._tell(f"waiting for the head at {self._orchestrator}")
                    told = True
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            return HeadAddresses(
                self._orchestrator, answer.experience_store_address, answer.reward_address
            )

    def keep(self) -> None:
        """Report until `leave`, also to a restarted head."""
        self._task = asyncio.create_task(self._report(), name="node")

    def stop_reporting(self) -> None:
        """End the reports, because services stop."""
        if self._task is not None:
            self._task.cancel()

    async def demand(self) -> TrainerDemand:
        """Return the current demand for trainers. Raises `TroupeError`."""
        reply = await self._stub.GetCluster(orchestrator_pb.GetClusterRequest())
        return TrainerDemand(reply.wanted_trainers, len(reply.bindings))

    async def leave(self) -> None:
        """End the reports and release the name; an unreachable head forgets it by itself."""
        self.stop_reporting()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        request = orchestrator_pb.JoinNodeRequest(
            name=self._name, instance=self._instance, protocol=NODE_PROTOCOL, leaving=True
        )
        try:
            await self._stub.JoinNode(request, timeout=_LEAVE_SECONDS)
        except TroupeError as error:
            _log.info("cannot tell the head that this node leaves: %s", error)
        await self._channel.close(0)

    async def _report(self) -> None:
        pause, away = _PAUSE_SECONDS, False
        while True:
            await asyncio.sleep(pause)
            try:
                answer = await self._stub.JoinNode(await self._request())
            except TroupeError as error:
                if not away:
                    self._tell(f"the head does not accept this node's reports: {error}")
                away, pause = True, _PAUSE_SECONDS
                continue
            if away:
                self._tell("the head accepts this node's reports again")
            away, pause = False, max(0.1, answer.next_seconds)

    async def _request(self) -> orchestrator_pb.JoinNodeRequest:
        use = await asyncio.to_thread(device_use, self._devices)
        request = orchestrator_pb.JoinNodeRequest(
            name=self._name, instance=self._instance, protocol=NODE_PROTOCOL, host=self._host
        )
        for one in self._devices:
            device = request.devices.add(
                index=one.index,
                device_class=one.device_class,
                memory_bytes=one.memory,
                process=self._process.get(one.index, ""),
            )
            if one.index in use:
                device.used_bytes = use[one.index].used_bytes
                device.utilization = use[one.index].utilization
        return request
