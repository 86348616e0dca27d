"""The processes of a cluster, its head or a node: a pure function from settings and ports to child
specs.

Services are named as modules to run (`python -m services.<name>`) and never imported: the
library knows no service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from troupe.cluster.inventory import NodeDevices
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.settings import LOOPBACK, ClusterSettings, transfer_fallback_dir
from troupe.cluster.state import TOKEN_VARIABLE
from troupe.devices import Device, visible
from troupe.rpc.addresses import is_loopback_host, join_address

CORE = ("experience_store", "reward", "orchestrator")
# The caller in routes to workers, which advertise one address to all callers.
ANYBODY = "*"
# (caller, callee) -> the "host:port" at which this caller reaches this callee.
Routes = Mapping[tuple[str, str], str]
# The callees of each kind of service, with the variable that has their address.
_CALLS: Mapping[str, Mapping[str, str]] = {
    "experience_store": {"redis": "TROUPE_REDIS_URL"},
    "reward": {},
    "orchestrator": {
        "redis": "TROUPE_REDIS_URL",
        "experience_store": "TROUPE_EXPERIENCE_STORE_ADDRESS",
        "reward": "TROUPE_REWARD_ADDRESS",
    },
    "rollout": {
        "experience_store": "TROUPE_EXPERIENCE_STORE_ADDRESS",
        "reward": "TROUPE_REWARD_ADDRESS",
        "orchestrator": "TROUPE_ORCHESTRATOR_ADDRESS",
    },
    "trainer": {
        "experience_store": "TROUPE_EXPERIENCE_STORE_ADDRESS",
        "orchestrator": "TROUPE_ORCHESTRATOR_ADDRESS",
    },
    "control_panel": {"orchestrator": "TROUPE_ORCHESTRATOR_ADDRESS"},
}
_WORKERS = ("rollout", "trainer")
# Names of fork servers.
WORKERS = "workers"
_SERVICES = "services"
# The services that must be ready before each kind starts, if this supervisor runs them.
_AFTER: Mapping[str, tuple[str, ...]] = {
    "experience_store": ("redis",),
    "reward": (),
    "orchestrator": ("redis",),
    "rollout": CORE,
    "trainer": ("experience_store", "orchestrator"),
    "control_panel": ("orchestrator",),
}
# The modules that each kind of service imports when it starts, after all kinds' common modules.
_COMMON = ("services.chassis.app", "troupe.job", "numpy")
_PRELOAD: Mapping[str, tuple[str, ...]] = {
    "experience_store": ("uvloop", "services.experience_store.server"),
    "reward": ("services.reward.server",),
    "orchestrator": ("uvloop", "services.orchestrator.server"),
    "control_panel": ("services.control_panel.app",),
    "rollout": (
        "torch",
        "services.rollout.server",
        "troupe.checkpoints.model_classes",
        "services.rollout.engines.embedded.engine",
    ),
    "trainer": ("torch", "troupe.checkpoints.model_classes", "services.trainer.server"),
}
_COPIES = "TROUPE_TRAINER_STATE_REPLICAS"
# The services whose addresses others need, in the order of `HeadAddresses`.
_CALLED = ("orchestrator", "experience_store", "reward")
# One more than the deaths after which a job is set aside (`limits.worker_deaths`: three).
_ORCHESTRATOR_ATTEMPTS = 4


@dataclass(frozen=True)
class ChildSpec:
    """One process that the supervisor keeps alive."""

    name: str
    command: tuple[str, ...]
    probe: Probe
    # "host:port" for other processes and people.
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    # The module that the command runs, and modules that it imports when it starts. With these, it
    # is forked from a server of this name that has imported them, if this system can do that.
    module: str = ""
    preload: tuple[str, ...] = ()
    fork_server: str = ""
    # The devices whose NUMA nodes it runs on.
    devices: tuple[Device, ...] = ()
    # Whether it keeps this process's TLS settings; servers on loopback do not need them.
    tls: bool = False
    # Names of children that must be ready before this one starts.
    after: tuple[str, ...] = ()
    metrics_address: str = ""
    start_seconds: float = 120.0
    # Directory of files that it reads before it is ready; it gets more time for them.
    reads: Path | None = None
    stop_seconds: float = 15.0
    # Number of attempts at its first start. An orchestrator may crash on a job that it resumes,
    # until it has set that job aside.
    start_attempts: int = 1
    # Number of deaths within two minutes before it is given up, and the longest restart pause.
    max_restarts: int = 6
    max_backoff_seconds: float = 8.0

    def full_environment(self) -> dict[str, str]:
        """Return its environment with the variables that it inherits from this process."""
        inherited = dict(os.environ)
        if not self.tls:
            # TLS settings are for calls to other machines.
            inherited = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_TLS_")}
        return inherited | dict(self.environment)


def service_names(settings: ClusterSettings, devices: NodeDevices | None = None) -> list[str]:
    """Return the names of the Python services in starting order. `devices` is their assignment
    (default: by the settings)."""
    devices = devices or settings.shares(settings.inventory())
    names = [] if settings.role == "node" else [*CORE]
    if settings.role != "head":
        names += [f"rollout-{i}" for i in range(len(devices.rollouts))]
        names += [f"trainer-{i}" for i in range(len(devices.trainers))]
    if settings.panel and settings.role != "node":
        names.append("control_panel")
    return names


def port_names(settings: ClusterSettings, devices: NodeDevices | None = None) -> list[str]:
    """Return the names of the required ports: one per service, and one for its metrics."""
    names = [] if settings.redis_url or settings.role == "node" else ["redis"]
    for service in service_names(settings, devices):
        names += [service, f"{service}/metrics"]
    return names


def links(settings: ClusterSettings) -> list[tuple[str, str]]:
    """Return every (caller, callee) that a route may redirect; workers' caller is `ANYBODY`."""
    found: list[tuple[str, str]] = []
    for name in service_names(settings):
        module, _, _ = name.partition("-")
        callees = [c for c in _CALLS[module] if c != "redis" or settings.redis_url is None]
        found += [(name, callee) for callee in callees]
        if module in _WORKERS:
            found.append((ANYBODY, name))
    return found


def thread_budget(settings: ClusterSettings, workers: int, cores: int) -> int:
    """Return the number of threads of one rollout or trainer worker.

    The sum over workers does not exceed the cores: two spinning thread pools on one core slow each
    other down by an order of magnitude.
    """
    if settings.threads is not None:
        return settings.threads
    return max(1, cores // max(1, workers))


@dataclass(frozen=True)
class HeadAddresses:
    """The addresses of the services that workers call, if another host's head runs them."""

    orchestrator: str
    experience_store: str
    reward: str


def plan(
    settings: ClusterSettings,
    ports: Mapping[str, int],
    devices: NodeDevices,
    *,
    redis_url: str = "",
    redis_command: tuple[str, ...] = (),
    head: HeadAddresses | None = None,
    token: SecretStr | None = None,
    cluster_id: str,
    parent_pid: int,
    routes: Routes = MappingProxyType({}),
    cores: int | None = None,
) -> list[ChildSpec]:
    """Return a supervisor's children in an order that respects `after`.

    `settings` are resolved; `ports` has one port for each of `port_names`; `devices` is each
    process's share; `redis_command` is empty when the Redis at `redis_url` is already running;
    `head` is a node's head; services require and send `token` (None: none). Callers reach callees
    directly unless `routes` has another address.
    """
    children: list[ChildSpec] = []
    local = is_loopback_host(settings.host)
    base = _shared_environment(settings, ports, redis_url, head, token, parent_pid)
    names = service_names(settings, devices)
    there = {redis for redis in ("redis",) if redis_command} | set(names)
    if redis_command:
        children.append(
            ChildSpec(
                name="redis",
                command=redis_command,
                probe=Probe(ProbeKind.REDIS, redis_url),
                address=f"{LOOPBACK}:{ports['redis']}",
                start_seconds=settings.start_seconds,
                reads=settings.data_dir / "redis",
                stop_seconds=settings.stop_seconds,
                max_restarts=settings.max_restarts,
                max_backoff_seconds=settings.max_backoff_seconds,
            )
        )
    workers = len(devices.rollouts) + len(devices.trainers)
    budget = thread_budget(settings, workers, cores or os.cpu_count() or 1)
    for name in names:
        module, _, _ = name.partition("-")
        threads = budget if module in _WORKERS else 1
        if module == "trainer" and settings.trainer_threads is not None:
            threads = settings.trainer_threads
        port, metrics_port = ports[name], ports[f"{name}/metrics"]
        address = join_address(settings.reachable_host, port)
        given = devices.of(name)
        panel = module == "control_panel"
        children.append(
            ChildSpec(
                name=name,
                command=(sys.executable, "-m", f"services.{module}"),
                module=f"services.{module}",
                # A driver's state does not survive a fork, so workers with devices start by
                # themselves: no import of theirs may open a device before.
                preload=() if given and module in _WORKERS else _COMMON + _PRELOAD[module],
                fork_server=WORKERS if module in _WORKERS else _SERVICES,
                probe=Probe(ProbeKind.HTTP if panel else ProbeKind.GRPC, address),
                address=address,
                metrics_address=join_address(settings.reachable_host, metrics_port),
                devices=given,
                tls=not local,
                environment={
                    **base,
                    **({} if local else {"TROUPE_ADVERTISE_ADDRESS": address}),
                    **_redirected(name, module, base, routes),
                    **thread_environment(threads),
                    **(visible(given) if devices.known else {}),
                    "TROUPE_PORT": str(port),
                    "TROUPE_METRICS_PORT": str(metrics_port),
                    "TROUPE_WORKER_ID": f"{name}-{cluster_id}",
                },
                after=tuple(one for one in _AFTER[module] if one in there),
                start_attempts=_ORCHESTRATOR_ATTEMPTS if module == "orchestrator" else 1,
                start_seconds=settings.start_seconds,
                stop_seconds=settings.stop_seconds,
                max_restarts=settings.max_restarts,
                max_backoff_seconds=settings.max_backoff_seconds,
            )
        )
    return children


def _shared_environment(
    settings: ClusterSettings,
    ports: Mapping[str, int],
    redis_url: str,
    head: HeadAddresses | None,
    token: SecretStr | None,
    parent_pid: int,
) -> dict[str, str]:
    assert settings.transfer_dir is not None  # ClusterSettings.resolved
    if head is None:
        own = (join_address(settings.reachable_host, ports[name]) for name in _CALLED)
        head = HeadAddresses(*own)
    return {
        "TROUPE_HOST": settings.host,
        **({"TROUPE_REDIS_URL": redis_url} if redis_url else {}),
        "TROUPE_ORCHESTRATOR_ADDRESS": head.orchestrator,
        "TROUPE_EXPERIENCE_STORE_ADDRESS": head.experience_store,
        "TROUPE_REWARD_ADDRESS": head.reward,
        "TROUPE_NODE": settings.name,
        "TROUPE_DATA_DIR": str(settings.jobs_dir),
        "TROUPE_TRANSFER_DIR": str(settings.transfer_dir),
        **_state_copies(settings),
        "TROUPE_TRANSFER_FALLBACK_DIR": str(transfer_fallback_dir(settings.data_dir)),
        "TROUPE_PARENT_PID": str(parent_pid),
        # A trainer of an embedded cluster must not take the hosts of a Slurm job for its gang.
        "TROUPE_GANG_NODES": os.environ.get("TROUPE_GANG_NODES", "1"),
        "TROUPE_LOG_FORMAT": "json",  # as `logs.last_line` expects
        "PYTHONPATH": python_path(Path.cwd(), os.environ.get("PYTHONPATH", "")),
        "PYTHONUNBUFFERED": "1",
        **settings.environment,
        **({} if token is None else {TOKEN_VARIABLE: token.get_secret_value()}),
    }


def _state_copies(settings: ClusterSettings) -> dict[str, str]:
    """Return the variables that make a node's trainers keep a copy of each committed state on
    another node, so that it survives the host. They do not if all hosts share one directory, or if
    `TROUPE_TRAINER_STATE_REPLICAS` is set."""
    apart = settings.role == "node" and settings.jobs_dir in (None, settings.data_dir)
    copies = os.environ.get(_COPIES, "1" if apart else "")
    return {_COPIES: copies} if copies else {}


def _redirected(name: str, module: str, base: Mapping[str, str], routes: Routes) -> dict[str, str]:
    """Return the address variables of the service `name` that `routes` changes."""
    changed: dict[str, str] = {}
    for callee, variable in _CALLS[module].items():
        way = routes.get((name, callee))
        if way is None:
            continue
        if callee == "redis":
            url = urlsplit(base[variable])
            secret, at, _ = url.netloc.rpartition("@")
            way = urlunsplit(url._replace(netloc=f"{secret}{at}{way}"))
        changed[variable] = way
    if (way := routes.get((ANYBODY, name))) is not None:
        changed["TROUPE_ADVERTISE_ADDRESS"] = way
    return changed


def python_path(directory: Path, inherited: str) -> str:
    """Put `directory` first, so that the workflow modules of the user's project import."""
    return os.pathsep.join([str(directory), *(p for p in inherited.split(os.pathsep) if p)])


def thread_environment(threads: int) -> dict[str, str]:
    """Return variables that bound the thread pools of numerical libraries; the default is all
    cores."""
    count = str(threads)
    return {
        "TROUPE_THREADS": count,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "RAYON_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        # An idle OpenMP thread sleeps instead of taking a neighbour's core.
        "OMP_WAIT_POLICY": "PASSIVE",
        # glibc keeps an arena of tens of MiB per thread and never returns it. Threads that compute
        # concurrently contend for a shared arena.
        "MALLOC_ARENA_MAX": str(threads + 1),
    }
