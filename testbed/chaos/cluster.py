"""An embedded cluster whose processes and connections can be disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from testbed.chaos.proxy import ProxiedNetwork
from troupe.client.aio import AsyncClient
from troupe.client.handle import AsyncJobHandle
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.cluster.layout import links, service_names
from troupe.cluster.state import ServiceRecord
from troupe.rpc.errors import DeadlineExceeded
from troupe.rpc.settings import ClientSettings

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class ServiceProcess:
    """One process of a service, by id and time of creation."""

    service: str
    pid: int
    created: float

    def process(self) -> psutil.Process | None:
        """Return the process, or None if it has ended (its id may be another's by now)."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            if same and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


class DisturbedCluster:
    """An embedded cluster with proxies of its connections and a client that survives power cuts."""

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        proxied: bool,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`proxied`: route every call between services through a proxy. Starts nothing."""
        self.settings = settings.resolved()
        self.pairs = links(settings) if proxied else []
        self.network = ProxiedNetwork(self.pairs)
        self.cluster = EmbeddedCluster(
            self.settings, tell=tell, router=self.network.route if proxied else None
        )
        # Held while the power is off, so that no call is made meanwhile.
        self.power = asyncio.Lock()
        self._client: AsyncClient | None = None

    @property
    def services(self) -> list[str]:
        """Names of all processes."""
        return ["redis", *service_names(self.settings)]

    async def start(self) -> None:
        """Start the cluster and connect to it. Raises the errors of `EmbeddedCluster.start`."""
        state = await self.cluster.start()
        settings = ClientSettings.of_environment().model_copy(
            update={"tls_ca": None, "tls_cert": None, "tls_key": None}
        )
        self._client = AsyncClient(state.orchestrator_address, settings=settings)

    async def stop(self) -> None:
        """Stop the cluster and its proxies."""
        self.network.heal()
        await self._disconnect()
        await self.cluster.stop()
        await self.network.close()

    async def power_off(self) -> float:
        """Kill every process at once and restart the cluster from its disk.

        Returns the seconds until all services were healthy again.
        """
        async with self.power:
            await self._disconnect()
            await self.cluster.crash()
            started = time.monotonic()
            await self.start()
            return time.monotonic() - started

    @property
    def client(self) -> AsyncClient:
        """A client of the orchestrator, without a proxy."""
        assert self._client is not None, "start() first"
        return self._client

    def job(self, job_id: str) -> AsyncJobHandle:
        """Return the handle of a job."""
        return self.client.job(job_id)

    def record(self, service: str) -> ServiceRecord:
        """Return the supervisor's record of a service."""
        return next(one for one in self.cluster.state.services if one.name == service)

    def process_of(self, service: str) -> ServiceProcess | None:
        """Return the running process of a service, or None."""
        record = self.record(service)
        if record.pid is None or record.created is None:
            return None
        found = ServiceProcess(service, record.pid, record.created)
        return found if found.process() is not None else None

    async def until_healthy(
        self, service: str, timeout: float, *, but: ServiceProcess | None = None
    ) -> None:
        """Wait until `service` serves in a process other than `but`.

        Raises `DeadlineExceeded` after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            record = self.record(service)
            another = but is None or record.pid != but.pid
            if record.state == "serving" and another and self.process_of(service) is not None:
                return
            await asyncio.sleep(_LOOK_SECONDS)
        raise DeadlineExceeded(
            f"is {self.record(service).state}, not healthy again within {timeout:g} s.",
            field="service",
            value=service,
            remedy=f"Its log is {self.record(service).log}.",
        )

    async def _disconnect(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()
