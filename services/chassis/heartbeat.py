"""Heartbeats of rollout and trainer workers to the orchestrator, and the id of a host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import grpc
import psutil
import structlog

from services.chassis.settings import ServiceSettings
from troupe.devices import Device
from troupe.rpc import NO_RETRY, TroupeError, connect
from troupe.v1 import orchestrator_pb2, orchestrator_pb2_grpc

log = structlog.get_logger("troupe.heartbeat")

Message = Callable[[], orchestrator_pb2.HeartbeatRequest]
# Timeout of one beat. Others follow meanwhile, so that it may be long: a busy event loop needs
# seconds until it sees an answer that has arrived.
_TIMEOUT_SECONDS = 10.0
# Interval while the orchestrator is unreachable, so that it learns of workers soon after a restart.
_AWAY_SECONDS = 0.25
# Bounds of the interval that the orchestrator may ask for.
_MIN_SECONDS, _MAX_SECONDS = 0.05, 30.0


class Heartbeat:
    """Background task that calls `Orchestrator.Heartbeat` every `interval` seconds until stopped.

    `message()` builds the request of each beat; worker id, address, memory and host are filled in
    if it leaves them empty.
    """

    def __init__(
        self, settings: ServiceSettings, message: Message, *, interval: float = 1.0
    ) -> None:
        self._settings = settings
        self._message = message
        self._interval = interval
        self._task: asyncio.Task[None] | None = None
        # Beats that have not been answered.
        self._beats: set[asyncio.Task[float]] = set()
        self._process = psutil.Process()
        self._reached: bool | None = None
        self._leaving = False

    @property
    def reached(self) -> bool:
        """Whether the last beat arrived."""
        return bool(self._reached)

    async def start(self) -> None:
        """Start the beats; returns at once."""
        self._task = asyncio.create_task(self._beat_on(), name="heartbeat")

    async def leave(self) -> None:
        """Announce, now and in every later beat, that the worker is leaving."""
        self._leaving = True
        if self._task is not None:
            async with self._channel() as channel:
                await self._beat(orchestrator_pb2_grpc.OrchestratorStub(channel), leaving=True)

    async def stop(self) -> None:
        """Announce that the worker is leaving, if the orchestrator answers, and stop the beats."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with self._channel() as channel:
            await self._beat(orchestrator_pb2_grpc.OrchestratorStub(channel), leaving=True)

    async def _beat_on(self) -> None:
        async with self._channel() as channel:
            stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
            pause = self._interval
            try:
                while True:
                    beat = asyncio.create_task(self._beat(stub), name="beat")
                    self._beats.add(beat)
                    beat.add_done_callback(self._beats.discard)
                    # The next one does not wait for an answer that is late: where thousands of
                    # trajectories share the event loop, each step of a call takes seconds, and a
                    # worker that says nothing meanwhile counts as lost.
                    done, _ = await asyncio.wait({beat}, timeout=pause)
                    if done:
                        pause = beat.result()
                        await asyncio.sleep(pause)
            finally:
                for beat in self._beats:
                    beat.cancel()
                await asyncio.gather(*self._beats, return_exceptions=True)

    async def _beat(
        self, stub: orchestrator_pb2_grpc.OrchestratorAsyncStub, *, leaving: bool = False
    ) -> float:
        """Send one heartbeat; returns the seconds until the next."""
        address = self._settings.orchestrator_address
        try:
            request = self._filled(self._message())
            request.draining = request.draining or leaving or self._leaving
            response = await stub.Heartbeat(request, timeout=0.5 if leaving else _TIMEOUT_SECONDS)
        except TroupeError as error:
            if self._reached is not False and not leaving:
                log.warning("orchestrator away", address=address, error=str(error))
            self._reached = False
            return min(self._interval, _AWAY_SECONDS)
        except Exception:
            # An error in message() must not make a live worker look dead.
            log.exception("no heartbeat could be made")
            return self._interval
        if not self._reached:
            log.info("orchestrator reached", address=address)
        self._reached = True
        wanted = response.next_seconds or self._interval
        return min(_MAX_SECONDS, max(_MIN_SECONDS, wanted))

    def _filled(
        self, request: orchestrator_pb2.HeartbeatRequest
    ) -> orchestrator_pb2.HeartbeatRequest:
        request.worker_id = request.worker_id or self._settings.worker_id
        request.address = request.address or self._settings.address
        request.rss_bytes = request.rss_bytes or self._process.memory_info().rss
        request.host_id = request.host_id or host_id()
        request.node = request.node or self._settings.node
        return request

    def _channel(self) -> grpc.aio.Channel:
        settings = self._settings
        return connect(settings.orchestrator_address, settings.client(retry=NO_RETRY))


def given_devices(
    devices: Iterable[Device], holders: Mapping[int, Sequence[str]]
) -> list[orchestrator_pb2.GivenDevice]:
    """The devices of a worker as its heartbeats report them. `holders`: what computes on each, by
    the device's index."""
    return [
        orchestrator_pb2.GivenDevice(
            index=one.index,
            device_class=one.device_class,
            memory_bytes=one.memory,
            holders=holders.get(one.index, ()),
        )
        for one in devices
    ]


@cache
def host_id() -> str:
    """The id of a memory domain: equal for processes of one boot of one host or container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()}/{boot}"
