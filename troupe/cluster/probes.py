"""Health probes of the cluster's processes (gRPC, HTTP, Redis); reports for `troupe status`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from troupe.cluster.redis import ping
from troupe.cluster.state import ClusterState, ServiceRecord, is_alive
from troupe.rpc import NO_RETRY, ClientSettings, connect
from troupe.rpc.addresses import split_address
from troupe.rpc.errors import TroupeError
from troupe.rpc.tokens import is_loopback_address


class ProbeKind(StrEnum):
    """The protocol that checks a child's readiness."""

    GRPC = "grpc"
    """The standard gRPC health service, overall."""
    HTTP = "http"
    """`GET /healthz` answers 200."""
    REDIS = "redis"
    """`INFO` answers and shows that Redis is fit to keep state."""


@dataclass(frozen=True)
class Probe:
    """A readiness check. `target` is host:port, or the URL of a Redis."""

    kind: ProbeKind
    target: str

    async def ask(self, timeout: float) -> str | None:
        """Return None when the child is ready, else a short reason. Never raises."""
        match self.kind:
            case ProbeKind.GRPC:
                return await _ask_grpc(self.target, timeout)
            case ProbeKind.HTTP:
                return await _ask_http(self.target, timeout)
            case ProbeKind.REDIS:
                return await ping(self.target, timeout)


async def _ask_grpc(address: str, timeout: float) -> str | None:
    # Make a new channel each time, since a channel backs off after failures.
    async with _channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        try:
            # Connecting is not covered by the call's own timeout on every version of gRPC.
            async with asyncio.timeout(timeout + 1):
                answer = await stub.Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()}: {error.details()}"
        except TroupeError as error:
            return str(error)
        except TimeoutError:
            return "no answer"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)).lower()


def _channel(address: str) -> grpc.aio.Channel:
    if not is_loopback_address(address):
        settings = ClientSettings.of_environment()
        if settings.tls_ca is not None:
            return connect(address, settings.model_copy(update={"retry": NO_RETRY}))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options)


async def _ask_http(address: str, timeout: float) -> str | None:
    # Written by hand: importing an HTTP library costs every CLI command a fifth of a second.
    host, port = split_address(address)
    request = f"GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(request.encode())
                status = (await reader.readline()).decode(errors="replace").split()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return str(error) or "no answer"
    if len(status) < 2 or not status[0].startswith("HTTP/"):
        return "not an HTTP server"
    return None if status[1] == "200" else f"HTTP status {status[1]}"


@dataclass(frozen=True)
class ServiceReport:
    """The health and memory of one process at the time of the probe."""

    record: ServiceRecord
    # Why it is not healthy; empty if it is.
    reason: str
    # Memory of the process and its descendants: the sum of their proportional set sizes, in which
    # each of n processes that share a page counts a part 1/n. Without /proc: resident set sizes.
    memory_bytes: int

    @property
    def healthy(self) -> bool:
        """Whether it serves, or is parked."""
        return not self.reason


async def inspect(state: ClusterState, timeout: float = 3.0) -> list[ServiceReport]:
    """Return a report of every process, after at most about `timeout` seconds."""
    return list(
        await asyncio.gather(*(_inspect_one(state, record, timeout) for record in state.services))
    )


async def _inspect_one(state: ClusterState, record: ServiceRecord, timeout: float) -> ServiceReport:
    if record.state == "parked":
        return ServiceReport(record, "", 0)
    if not is_alive(record.pid, record.created):
        # Between death and restart there is no process: report the supervisor's state.
        return ServiceReport(record, record.state if record.state != "serving" else "dead", 0)
    kind = ProbeKind(record.probe)
    target = state.redis_url if kind == ProbeKind.REDIS else record.address
    reason = await Probe(kind, target).ask(timeout)
    return ServiceReport(record, reason or "", _memory(record.pid))


def _memory(pid: int | None) -> int:
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += _proportional_set_size(one.pid) or one.memory_info().rss
    return total


def _proportional_set_size(pid: int) -> int | None:
    """Return bytes; None where the kernel does not say: another system, another user's process."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None
