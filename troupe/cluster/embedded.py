"""The embedded cluster: every service of Troupe on this machine, as children of one process."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from troupe.cluster.access import TOKEN_VARIABLE, close_to_others, require_token, token_path
from troupe.cluster.child import Child
from troupe.cluster.elastic import Binder, ElasticTrainers
from troupe.cluster.errors import NotWritable, TransferDirNotWritable
from troupe.cluster.layout import ChildSpec, Routes, plan, port_names
from troupe.cluster.orphans import end_orphans
from troupe.cluster.ports import is_free, pick_ports, require_free
from troupe.cluster.redis import redis_executable, require_redis, write_config
from troupe.cluster.settings import (
    DEFAULT_PANEL_PORT,
    LOOPBACK,
    ClusterSettings,
    default_transfer_dir,
    transfer_fallback_dir,
)
from troupe.cluster.state import (
    ClusterLock,
    ClusterState,
    Phase,
    ServiceRecord,
    created_at,
    read_state,
    write_state,
)
from troupe.cluster.supervisor import Supervisor
from troupe.rpc.errors import TroupeError
from troupe.rpc.tokens import ClusterRecord
from troupe.scratch import is_foreseeable, private_directory

# From the addresses of all processes to the ways between them, made before any of them starts.
Router = Callable[[Mapping[str, str]], Awaitable[Routes]]


class EmbeddedCluster:
    """Starts, watches and stops a cluster; an async context manager.

    The calling process is the supervisor: when it dies, by whatever signal, the cluster ends.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        tell: Callable[[str], None] = lambda event: None,
        router: Router | None = None,
    ) -> None:
        """`tell` is called with what a person should know: a service died, a service is back.

        `router` may lead calls between services another way, through proxies of its own.
        """
        self.settings = settings.resolved()
        self._tell = tell
        self._router = router
        self._lock = ClusterLock(self.settings.data_dir)
        self._supervisor: Supervisor | None = None
        self._state: ClusterState | None = None
        self._elastic: asyncio.Task[None] | None = None
        self._token: SecretStr | None = None
        self._record: ClusterRecord | None = None

    @property
    def state(self) -> ClusterState:
        """Addresses, process ids and logs, as in the state file."""
        assert self._state is not None, "start() first"
        return self._state

    async def start(self) -> ClusterState:
        """Start everything and wait until all services are healthy.

        Raises `ClusterRunning`, `PortInUse`, `RedisMissing`, `RedisUnavailable`, `NotWritable`,
        `NotPrivate`, `TransferDirNotWritable`, or what keeps a service from starting; nothing is
        left running then.
        """
        data_dir = self.settings.data_dir
        try:
            close_to_others(data_dir)
            self._lock.acquire()
            await end_orphans(read_state(data_dir), timeout=self.settings.stop_seconds)
            await self._start_locked()
        except OSError as error:
            await self._close()
            raise NotWritable(data_dir, error) from error
        except BaseException as error:
            self._set_phase("failed", str(error))
            await self._close()
            raise
        return self.state

    async def failure(self) -> TroupeError:
        """Wait until a service is given up for good; returns why."""
        assert self._supervisor is not None, "start() first"
        error = await self._supervisor.failure()
        self._set_phase("failed", str(error))
        return error

    async def stop(self) -> None:
        """Stop all services, dependents first, and remove what they shared in memory."""
        if self._supervisor is None:
            return
        if self.state.phase != "failed":
            self._set_phase("stopping")
        await self._settle()
        await self._supervisor.stop()
        if self.state.phase != "failed":
            self._set_phase("stopped")
        await self._close()

    async def crash(self) -> None:
        """End everything at once as a power cut does: SIGKILL, and what is in memory is gone.

        For those who test what survives. The cluster can be started again.
        """
        if self._supervisor is not None:
            if self._elastic is not None:
                self._elastic.cancel()
            await self._supervisor.kill()
            await self._close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _start_locked(self) -> None:
        settings = self.settings
        ports = pick_ports(port_names(settings), fixed=self._fixed_ports())
        cluster_id = secrets.token_hex(3)
        self._token = require_token(settings.data_dir, settings.environment)
        if settings.redis_url is None:
            server = redis_executable()
            config, redis_url = write_config(
                settings.data_dir, ports["redis"], fsync=settings.redis_fsync
            )
            command: tuple[str, ...] = (server, str(config))
        else:
            redis_url, command = settings.redis_url, ()
            await require_redis(redis_url)
        routes: Routes = {}
        if self._router is not None:
            routes = await self._router(
                {n: f"{LOOPBACK}:{p}" for n, p in ports.items() if "/" not in n}
            )
        specs = plan(
            settings,
            ports,
            redis_url=redis_url,
            redis_command=command,
            token=self._token,
            cluster_id=cluster_id,
            parent_pid=os.getpid(),
            routes=routes,
        )
        panel = f"http://{LOOPBACK}:{ports['control_panel']}" if settings.panel else ""
        assert settings.transfer_dir is not None  # resolved
        self._state = ClusterState(
            cluster_id=cluster_id,
            phase="starting",
            supervisor_pid=os.getpid(),
            supervisor_created=created_at(os.getpid()) or time.time(),
            started_at=time.time(),
            data_dir=settings.data_dir,
            transfer_dir=settings.transfer_dir,
            redis_url=redis_url,
            orchestrator_address=f"{LOOPBACK}:{ports['orchestrator']}",
            panel_url=panel,
        )
        _make_transfer_dir(settings.transfer_dir)
        self._tell_addresses(cluster_id, specs)
        self._supervisor = Supervisor(specs, settings.data_dir / "logs", self._child_changed)
        self._set_phase("starting")
        await self._supervisor.start()
        self._set_phase("ready")
        if settings.trainer_idle_seconds is not None:
            elastic = self._follow_demand(self._supervisor, settings.trainer_idle_seconds)
            self._elastic = asyncio.create_task(elastic, name="elastic-trainers")

    async def _follow_demand(self, supervisor: Supervisor, idle_seconds: float) -> None:
        assert self._token is not None  # _start_locked
        binder = Binder(self.state.orchestrator_address, self._token)
        names = [name for name in supervisor.children if name.startswith("trainer-")]
        try:
            await ElasticTrainers(supervisor, names, binder.demand, idle_seconds).run()
        except Exception as error:
            self._tell(f"trainers follow what is wanted no longer: {error!r}")
            raise
        finally:
            await binder.close()

    def _tell_addresses(self, cluster_id: str, specs: Sequence[ChildSpec]) -> None:
        """Have this user's programs find the token by the address of a service."""
        addresses = [spec.address for spec in specs if TOKEN_VARIABLE in spec.environment]
        try:
            self._record = ClusterRecord(cluster_id, token_path(self.settings.data_dir), addresses)
        except OSError as error:
            # Who names the data directory still finds it.
            self._tell(f"programs that are given an address find no token: {error.strerror}")

    async def _settle(self) -> None:
        """Have nobody park or bring back anything any more."""
        if self._elastic is not None:
            self._elastic.cancel()
            await asyncio.gather(self._elastic, return_exceptions=True)
            self._elastic = None

    def _fixed_ports(self) -> dict[str, int]:
        settings = self.settings
        fixed: dict[str, int] = {}
        if settings.redis_url is None and settings.redis_port is not None:
            fixed["redis"] = require_free(
                settings.redis_port, field="redis_port", option="--redis-port"
            )
        if settings.panel and settings.panel_port is not None:
            fixed["control_panel"] = require_free(
                settings.panel_port, field="panel_port", option="--panel-port"
            )
        elif settings.panel:
            if is_free(DEFAULT_PANEL_PORT):
                fixed["control_panel"] = DEFAULT_PANEL_PORT
            else:
                self._tell(f"port {DEFAULT_PANEL_PORT} is taken: the panel is at another")
        return fixed

    def _child_changed(self, child: Child, event: str) -> None:
        self._set_phase(self.state.phase, self.state.message)
        if event:
            self._tell(event)

    def _set_phase(self, phase: Phase, message: str = "") -> None:
        if self._state is None:
            return
        children = self._supervisor.children.values() if self._supervisor else ()
        self._state = self._state.model_copy(
            update={
                "phase": phase,
                "message": message,
                "services": [_record(child) for child in children],
            }
        )
        try:
            write_state(self._state)
        except OSError as error:
            # A full disk must not take down services that may well survive it.
            self._tell(f"the cluster's state file cannot be written: {error.strerror}")

    async def _close(self) -> None:
        await self._settle()
        data_dir = self.settings.data_dir
        if self._state is not None:
            # Only copies for the engines: training state is on disk.
            gone = {transfer_fallback_dir(data_dir)}
            if self._state.transfer_dir == (own := default_transfer_dir(data_dir)):
                gone.add(own)
            for directory in gone:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        if self._record is not None:
            self._record.close()
            self._record = None
        self._supervisor = None
        self._lock.release()


def _record(child: Child) -> ServiceRecord:
    spec = child.spec
    return ServiceRecord(
        name=spec.name,
        state=child.state,
        address=spec.address,
        metrics_address=spec.metrics_address,
        probe=spec.probe.kind,
        pid=child.pid,
        created=created_at(child.pid) if child.pid else None,
        restarts=child.restarts,
        log=child.log,
    )


def _make_transfer_dir(directory: Path) -> None:
    """Raises `TransferDirNotWritable`."""
    try:
        if is_foreseeable(directory):
            private_directory(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise TransferDirNotWritable(directory, error) from error
