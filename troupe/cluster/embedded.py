"""`EmbeddedCluster`: the services of Troupe on this machine as child processes, their ports, and
trainers that are parked while no policy needs one."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from troupe.cluster.child import Child, ChildState
from troupe.cluster.errors import (
    ChildFailed,
    NotPrivate,
    NotWritable,
    PortInUse,
    RedisDataDamaged,
    TransferDirNotWritable,
)
from troupe.cluster.layout import ChildSpec, HeadAddresses, Routes, plan, port_names, service_names
from troupe.cluster.membership import NodeMembership, TrainerDemand
from troupe.cluster.redis import (
    append_file,
    mend_append_file,
    redis_executable,
    require_redis,
    write_config,
)
from troupe.cluster.settings import (
    DEFAULT_HEAD_PORT,
    DEFAULT_PANEL_PORT,
    LOOPBACK,
    ClusterSettings,
    default_transfer_dir,
    transfer_fallback_dir,
)
from troupe.cluster.state import (
    TOKEN_VARIABLE,
    ClusterLock,
    ClusterState,
    Phase,
    ServiceRecord,
    close_to_others,
    created_at,
    end_orphans,
    read_state,
    require_token,
    token_path,
    write_state,
)
from troupe.cluster.supervisor import Supervisor, longest_stop
from troupe.disks import own_directory, replaceable_part, strangers_part, writable_by_all
from troupe.rpc.addresses import (
    LOOPBACKS,
    http_url,
    is_wildcard_host,
    join_address,
    split_address,
)
from troupe.rpc.errors import TroupeError, port_error
from troupe.rpc.tokens import ClusterRecord

# Ports to choose from: below 32768, where Linux's ephemeral range starts.
FIRST_PORT, LAST_PORT = 20_000, 32_000
# How often the demand for trainers is polled.
_POLL_SECONDS: Final = 1.0
# Maps the addresses of all processes to the routes between them, before any of them starts.
Router = Callable[[Mapping[str, str]], Awaitable[Routes]]


class EmbeddedCluster:
    """An async context manager that starts, supervises and stops a cluster, its head or a node.

    The calling process is the supervisor: when it dies, by any signal, the services end.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        tell: Callable[[str], None] = lambda event: None,
        router: Router | None = None,
    ) -> None:
        """Call `tell` with events for people: a service died, a service is back.

        `router` may route calls between services through its own proxies.
        """
        self.settings = settings.resolved()
        self._tell = tell
        self._router = router
        self._lock = ClusterLock(self.settings.data_dir)
        # Of the panel's usual port.
        self._reservation: socket.socket | None = None
        self._supervisor: Supervisor | None = None
        self._state: ClusterState | None = None
        self._elastic: asyncio.Task[None] | None = None
        self._record: ClusterRecord | None = None
        self._membership: NodeMembership | None = None

    @property
    def state(self) -> ClusterState:
        """The addresses, process ids and logs, as in the state file."""
        assert self._state is not None, "start() first"
        return self._state

    async def start(self) -> ClusterState:
        """Start everything and wait until all services are healthy.

        Raises `ClusterRunning`, `PortInUse`, `RedisMissing`, `RedisDataDamaged`, `NotWritable`,
        `NotPrivate`, `TransferDirNotWritable`, `InvalidArgument` for missing devices, the errors of
        `NodeMembership.join`, or the error of a service that does not start. After an error nothing
        is left running.
        """
        data_dir = self.settings.data_dir
        try:
            close_to_others(data_dir)
            jobs_dir = self.settings.jobs_dir or data_dir
            if (found := strangers_part(jobs_dir)) is not None:
                raise NotPrivate(jobs_dir, *found, field="jobs_dir")
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
        """Wait until a service is given up for good, and return its error."""
        assert self._supervisor is not None, "start() first"
        error = await self._supervisor.failure()
        self._set_phase("failed", str(error))
        return error

    async def stop(self) -> None:
        """Stop all services, dependents first, and remove their shared memory."""
        if self._supervisor is None:
            return
        if self.state.phase != "failed":
            self._set_phase("stopping")
        await self._stop_elastic()
        if self._membership is not None:
            self._membership.stop_reporting()
        await self._supervisor.stop()
        if self.state.phase != "failed":
            self._set_phase("stopped")
        await self._close()

    async def crash(self) -> None:
        """Kill all processes at once, as a power cut does; the cluster can be started again.

        For tests of durability.
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
        inventory = settings.inventory()
        devices = settings.shares(inventory)
        if devices.shared:
            self._tell(
                "engines and the trainer share the only device: limit the memory of SGLang servers "
                "(--mem-fraction-static in `engine.launch`)"
            )
        assert settings.transfer_dir is not None  # resolved
        self._tell_open_places(settings.transfer_dir)
        ports = pick_ports(
            port_names(settings, devices), host=settings.host, fixed=self._fixed_ports()
        )
        cluster_id = secrets.token_hex(3)
        token = require_token(settings.data_dir, settings.environment)
        orchestrator = settings.head or join_address(settings.reachable_host, ports["orchestrator"])
        self._membership = NodeMembership(
            settings,
            orchestrator,
            token,
            inventory,
            {name: devices.of(name) for name in service_names(settings, devices)},
            self._tell,
        )
        head: HeadAddresses | None = None
        redis_url = ""
        command: tuple[str, ...] = ()
        if settings.role == "node":
            head = await self._membership.join(settings.start_seconds)
        elif settings.redis_url is None:
            server = redis_executable()
            cut = await asyncio.to_thread(
                mend_append_file, settings.data_dir, server, expected=_ran_redis(settings.data_dir)
            )
            if cut:
                self._tell(cut)
            config, redis_url = write_config(
                settings.data_dir, ports["redis"], fsync=settings.redis_fsync
            )
            command = (server, str(config))
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
            devices,
            redis_url=redis_url,
            redis_command=command,
            head=head,
            token=token,
            cluster_id=cluster_id,
            parent_pid=os.getpid(),
            routes=routes,
        )
        port = ports.get("control_panel")
        panel = http_url(settings.reachable_host, port) if port else ""
        # Before the state exists: the end removes the directory that it names.
        _make_transfer_dir(settings.transfer_dir)
        self._state = ClusterState(
            cluster_id=cluster_id,
            phase="starting",
            supervisor_pid=os.getpid(),
            supervisor_created=created_at(os.getpid()) or time.time(),
            started_at=time.time(),
            data_dir=settings.data_dir,
            transfer_dir=settings.transfer_dir,
            redis_url=redis_url,
            orchestrator_address=orchestrator,
            panel_url=panel,
            stop_seconds=longest_stop(specs),
        )
        self._tell_addresses(cluster_id, specs)
        self._supervisor = Supervisor(specs, settings.data_dir / "logs", self._child_changed)
        self._set_phase("starting")
        try:
            await self._supervisor.start()
        except ChildFailed as error:
            if error.value == "redis" and "append only file" in error.message:
                what = f"was rejected by Redis: {error.message.rstrip('.')}"
                raise RedisDataDamaged(append_file(settings.data_dir), what) from error
            raise
        if settings.role != "head":
            self._membership.keep()
        self._set_phase("ready")
        if settings.trainer_idle_seconds is not None:
            elastic = self._follow_demand(
                self._supervisor, self._membership, settings.trainer_idle_seconds
            )
            self._elastic = asyncio.create_task(elastic, name="elastic-trainers")

    def _tell_open_places(self, transfer_dir: Path) -> None:
        """Name directories in which other users may put code for jobs, or replace what is there."""
        here, whose = Path.cwd(), ""
        if writable_by_all(here):
            whose = "where every user may write"
        elif (owner := here.stat().st_uid) not in (0, os.geteuid()):
            whose = f"which belongs to another user (uid {owner})"
        if whose:
            self._tell(
                f"jobs import modules from {here}, {whose}: start the cluster in a directory of "
                "your own"
            )
        found = {replaceable_part(one) for one in (self.settings.data_dir, transfer_dir)}
        for part in found - {None}:
            self._tell(
                f"every user may replace the cluster's directories in {part}: set its sticky bit "
                f"(chmod +t {part}), or name others (--data-dir, TROUPE_TRANSFER_DIR)"
            )

    async def _follow_demand(
        self, supervisor: Supervisor, membership: NodeMembership, idle_seconds: float
    ) -> None:
        names = [name for name in supervisor.children if name.startswith("trainer-")]
        try:
            await ElasticTrainers(supervisor, names, membership.demand, idle_seconds).run()
        except Exception as error:
            self._tell(f"trainers no longer follow the demand: {error!r}")
            raise

    def _tell_addresses(self, cluster_id: str, specs: Sequence[ChildSpec]) -> None:
        """Record the services' addresses, so that this user's programs find the token."""
        addresses = [spec.address for spec in specs if TOKEN_VARIABLE in spec.environment]
        host = self.settings.host
        if is_wildcard_host(host) or host.lower() == "localhost":
            # This machine may also call them at either loopback address.
            ports = [split_address(address)[1] for address in addresses]
            addresses += [join_address(host, port) for host in LOOPBACKS for port in ports]
        try:
            self._record = ClusterRecord(cluster_id, token_path(self.settings.data_dir), addresses)
        except OSError as error:
            # Programs that name the data directory still find it.
            self._tell(f"programs cannot find the token by address: {error.strerror}")

    async def _stop_elastic(self) -> None:
        """Stop parking and unparking trainers."""
        if self._elastic is not None:
            self._elastic.cancel()
            await asyncio.gather(self._elastic, return_exceptions=True)
            self._elastic = None

    def _fixed_ports(self) -> dict[str, int]:
        settings = self.settings
        fixed: dict[str, int] = {}
        if settings.role == "node":
            return fixed
        if settings.port is not None or settings.role == "head":
            fixed["orchestrator"] = require_free(
                settings.port or DEFAULT_HEAD_PORT, settings.host, field="port", option="--port"
            )
        if settings.redis_url is None and settings.redis_port is not None:
            fixed["redis"] = require_free(
                settings.redis_port, field="redis_port", option="--redis-port"
            )
        if settings.panel and settings.panel_port is not None:
            fixed["control_panel"] = require_free(
                settings.panel_port, settings.host, field="panel_port", option="--panel-port"
            )
        elif settings.panel:
            self._reservation = reserve_port(DEFAULT_PANEL_PORT)
            if self._reservation and is_free(DEFAULT_PANEL_PORT, settings.host):
                fixed["control_panel"] = DEFAULT_PANEL_PORT
            else:
                self._tell(f"port {DEFAULT_PANEL_PORT} is taken: the panel uses another port")
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
            # Services may survive a full disk; this error must not end them.
            self._tell(f"the cluster's state file cannot be written: {error.strerror}")

    async def _close(self) -> None:
        await self._stop_elastic()
        if self._membership is not None:
            await self._membership.leave()
            self._membership = None
        data_dir = self.settings.data_dir
        if self._state is not None:
            # These hold copies for engines; training state is on disk.
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
        if self._reservation is not None:
            self._reservation.close()


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


def _ran_redis(data_dir: Path) -> bool:
    """Return whether the last cluster of `data_dir` was ready, with a Redis of its own."""
    last = read_state(data_dir)
    if last is None or last.phase in ("starting", "failed"):
        return False
    return any(service.name == "redis" for service in last.services)


def _make_transfer_dir(directory: Path) -> None:
    """Make the transfer directory. Raises `TransferDirNotWritable`."""
    try:
        own_directory(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise TransferDirNotWritable(directory, error) from error


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could listen on this port of `host` now.

    Raises `TroupeError` if this machine has no such host.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As servers do: a connection in TIME_WAIT does not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise port_error(host, port, "--port", error, "--host") from error
    return True


def reserve_port(port: int) -> socket.socket | None:
    """Keep other clusters of this machine from choosing `port` until the result is closed, although
    nothing listens there yet; None: another cluster does so.

    A name in Linux' abstract namespace, which belongs to the network namespace, as ports do, and
    ends with this process.
    """
    reservation = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            reservation.bind(f"\0troupe-port-{port}")
        except OSError:
            reservation.close()
            return None
    return reservation


def require_free(port: int, host: str = LOOPBACK, *, field: str, option: str) -> int:
    """Return `port`. Raises `PortInUse`, which names the setting and the option that changes it."""
    if not is_free(port, host):
        raise PortInUse(field=field, port=port, host=host, option=option)
    return port


def pick_ports(
    names: Iterable[str],
    *,
    host: str = LOOPBACK,
    fixed: dict[str, int] | None = None,
) -> dict[str, int]:
    """Choose a different port for every name, free at `host` and at loopback, where Redis listens;
    `fixed` ports are used as given.

    The search begins at a random port, so that clusters that start at the same time do not collide.
    """
    chosen = dict(fixed or {})
    candidate = Random(os.urandom(8)).randrange(FIRST_PORT, LAST_PORT)
    tried = 0
    for name in names:
        if name in chosen:
            continue
        while candidate in chosen.values() or not (is_free(candidate, host) and is_free(candidate)):
            candidate = _next_port(candidate)
            tried += 1
            if tried > LAST_PORT - FIRST_PORT:
                raise PortInUse(field="ports", port=candidate, host=host, option="")
        chosen[name] = candidate
        candidate = _next_port(candidate)
    return chosen


def _next_port(port: int) -> int:
    return port + 1 if port + 1 < LAST_PORT else FIRST_PORT


class ElasticTrainers:
    """A task that parks trainers while no policy needs one, and restarts them on demand."""

    def __init__(
        self,
        supervisor: Supervisor,
        names: Sequence[str],
        demand: Callable[[], Awaitable[TrainerDemand]],
        idle_seconds: float,
    ) -> None:
        """Park the children `names` of `supervisor` after `idle_seconds` without demand. When
        `demand` raises `TroupeError`, nothing changes."""
        self._supervisor = supervisor
        self._names = list(names)
        self._demand = demand
        self._idle_seconds = idle_seconds

    async def run(self) -> None:
        """Follow the demand until cancelled."""
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
                await self._unpark(demand.wanted)
                continue
            now = time.monotonic()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since >= self._idle_seconds:
                await self._park()

    async def _unpark(self, wanted: int) -> None:
        parked = self._names_in(ChildState.PARKED)
        missing = wanted - (len(self._names) - len(parked))
        await asyncio.gather(*map(self._supervisor.unpark, parked[: max(0, missing)]))

    async def _park(self) -> None:
        # A restarting trainer is parked later, when it serves.
        await asyncio.gather(*map(self._supervisor.park, self._names_in(ChildState.SERVING)))

    def _names_in(self, state: ChildState) -> list[str]:
        return [name for name in self._names if self._supervisor.children[name].state == state]
