"""One service behind its port: bind, become ready, answer, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.chassis.interceptor import ChassisInterceptor
from services.chassis.ports import bind, server_options
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from troupe.user_code import DaemonThreads

log = structlog.get_logger("troupe.app")

S = TypeVar("S", bound=ServiceSettings)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service(Protocol):
    """What the chassis serves. Handlers raise `TroupeError`; they never abort the context."""

    name: str
    """Full gRPC name, "troupe.v1.Reward"."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""

    async def start(self) -> None:
        """Get ready; calls are refused (UNAVAILABLE) and health is NOT_SERVING until then."""

    async def stop(self, grace: float) -> None:
        """Let go of everything within `grace` seconds; no call is in flight any more.

        Also called after a `start` that failed or was interrupted.
        """


@runtime_checkable
class WaitingService(Protocol):
    """A service that can say what its start waits for."""

    @property
    def problem(self) -> str | None:
        """What it waits for, in words: calls that are refused meanwhile say so."""


@runtime_checkable
class LeavingService(Protocol):
    """A service that has somebody to tell that it leaves, before what is in flight has ended."""

    async def leave(self) -> None:
        """Say so, within a few seconds; calls in flight go on, new ones are refused already."""


Factory = Callable[[S, Telemetry], Service]


class RunningServer(Generic[S]):
    """One service behind its gRPC port, from binding to the end of the drain."""

    def __init__(self, make: Service | Factory[S], settings: S) -> None:
        self._make = make
        self.settings = settings
        self.telemetry = Telemetry()
        self.service: Service | None = None
        self._interceptor = ChassisInterceptor(settings, self.telemetry)
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._started = False

    @property
    def address(self) -> str:
        """Where to call it: "host:port" with the port that it really has."""
        return self.settings.address

    @property
    def metrics_port(self) -> int:
        """Port of `/metrics`."""
        return self.settings.metrics_port

    async def open(self) -> None:
        """Take the ports, make the service, answer health checks with NOT_SERVING.

        Raises `TroupeError` when a port cannot be had.
        """
        # Also for the users' own `asyncio.to_thread`.
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        server = grpc.aio.server(
            interceptors=[self._interceptor], options=server_options(self.settings)
        )
        port = bind(server, self.settings)
        try:
            metrics_port = self.telemetry.serve_metrics(self.settings)
            self.settings = self.settings.model_copy(
                update={"port": port, "metrics_port": metrics_port}
            )
            make = self._make
            if callable(make):
                service: Service = make(self.settings, self.telemetry)
            else:
                service = make
            self.telemetry.service = service.name
            service.add_to(server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
            for name in ("", service.name):
                await self._health.set(name, _NOT_SERVING)
            await server.start()
        except BaseException:
            self.telemetry.close()
            await server.stop(0)
            raise
        self.service = service
        self._server = server

    async def become_ready(self) -> None:
        """Start the service, then answer calls and say SERVING."""
        assert self.service is not None, "open() comes first"
        self._started = True
        if isinstance(self.service, WaitingService):
            waiting = self.service
            self._interceptor.problem = lambda: waiting.problem
        await self.service.start()
        self._interceptor.state = "serving"
        for name in ("", self.service.name):
            await self._health.set(name, _SERVING)
        settings = self.settings
        if settings.port_file is not None:
            settings.port_file.parent.mkdir(parents=True, exist_ok=True)
            half = settings.port_file.with_name(f".{settings.port_file.name}.{os.getpid()}")
            half.write_text(f"{settings.port} {settings.metrics_port}\n")
            half.replace(settings.port_file)
        log.info("serving", name=self.service.name, address=self.address)
        if strangers := settings.strangers:
            log.warning(f"{strangers} can use it; set TROUPE_TOKEN", host=settings.host)

    async def close(self) -> None:
        """NOT_SERVING, drain, stop. Idempotent."""
        server, self._server = self._server, None
        if server is None or self.service is None:
            return
        settings = self.settings
        self._interceptor.state = "draining"
        await self._health.enter_graceful_shutdown()
        log.info("draining", name=self.service.name, seconds=settings.drain_seconds)
        if settings.port_file is not None:
            settings.port_file.unlink(missing_ok=True)
        if self._started and isinstance(self.service, LeavingService):
            await self.service.leave()
        # Refuses new connections at once and ends when nothing is in flight.
        stopping = asyncio.ensure_future(server.stop(settings.drain_seconds + 1))
        await asyncio.wait({stopping}, timeout=min(_stream_drain(settings), settings.drain_seconds))
        self._interceptor.cut_streams()
        await asyncio.wait(
            {stopping}, timeout=max(0.0, settings.drain_seconds - _stream_drain(settings))
        )
        self._interceptor.cut_unary()
        # gRPC itself waits for handlers; one that will not be cancelled is left behind.
        await asyncio.wait({stopping}, timeout=5)
        await self._interceptor.idempotency.close()
        if self._started:
            try:
                async with asyncio.timeout(settings.drain_seconds + 5):
                    await self.service.stop(settings.drain_seconds)
            except TimeoutError:
                log.error("did not stop in time", name=self.service.name)
        self.telemetry.close()
        log.info("stopped", name=self.service.name)


@contextlib.asynccontextmanager
async def serve(make: Service | Factory[S], settings: S) -> AsyncIterator[RunningServer[S]]:
    """Serve in this event loop: `async with serve(service, settings) as server`.

    `make` is the service, or what makes it from settings (with the real ports) and telemetry.
    """
    server = RunningServer(make, settings)
    await server.open()
    try:
        await server.become_ready()
        yield server
    finally:
        await server.close()


def _stream_drain(settings: ServiceSettings) -> float:
    return min(settings.stream_drain_seconds, settings.drain_seconds)
