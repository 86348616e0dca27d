"""Shared parts of fake rollout and trainer workers: a server, a heartbeat, and a sudden death.

They speak to a real experience store and a real orchestrator. What they generate and learn is
made up; that every trajectory ends once and every sample is committed once is not.
"""

from __future__ import annotations

import asyncio

import grpc

from services.chassis.app import RunningServer
from services.chassis.heartbeat import Heartbeat
from services.chassis.settings import ServiceSettings
from tests.support.waiting import PATIENCE
from troupe.rpc import Unavailable, connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub


class FakeWorker:
    """A worker process: a server, a heartbeat, and a sudden death."""

    kind = orchestrator_pb.WORKER_KIND_UNSPECIFIED
    name = ""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._server: RunningServer[ServiceSettings] | None = None
        self._beating: Heartbeat | None = None
        self._dying: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._channel = connect(settings.experience_store_address, settings.client())
        self.store = ExperienceStoreStub(self._channel)

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.settings.worker_id

    def message(self) -> orchestrator_pb.HeartbeatRequest:
        """The heartbeat."""
        return orchestrator_pb.HeartbeatRequest(kind=self.kind)

    async def start(self) -> None:
        """Called by the chassis."""

    async def stop(self, grace: float) -> None:
        """Called by the chassis."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Called by the chassis."""
        raise NotImplementedError

    async def up(self) -> None:
        """Serve and beat."""
        self._server = RunningServer(self, self.settings)  # type: ignore[arg-type]
        await self._server.open()
        await self._server.become_ready()
        self.settings = self._server.settings
        await self.speak()

    async def speak(self) -> None:
        """Send heartbeats, from the start or after `fall_silent`."""
        self._beating = Heartbeat(self.settings, self.message, interval=0.1)
        await self._beating.start()

    async def fall_silent(self) -> None:
        """Send no more heartbeats; calls are answered as before."""
        beating, self._beating = self._beating, None
        if beating is not None:
            await beating.stop_beats()

    async def down(self) -> None:
        """Die: the port closes, streams break, no heartbeat says goodbye."""
        await self.fall_silent()
        server, self._server = self._server, None
        if server is not None:
            await server.close()
            await self._channel.close(None)

    async def death(self) -> None:
        """Wait until it has died."""
        async with asyncio.timeout(PATIENCE):
            await self._dead.wait()

    def die(self) -> Unavailable:
        """Go down soon; until then this is the answer."""
        self._dying = asyncio.create_task(self.down())
        self._dying.add_done_callback(lambda _: self._dead.set())
        return Unavailable("killed by the script", kind="killed")
