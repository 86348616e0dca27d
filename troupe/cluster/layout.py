"""The processes of an embedded cluster: a pure function from settings and ports to child specs.

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

from troupe.cluster.access import TOKEN_VARIABLE
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.settings import LOOPBACK, ClusterSettings, transfer_fallback_dir

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
    # Names of children that must be ready before this one starts.
    after: tuple[str, ...] = ()
    metrics_address: str = ""
    start_seconds: float = 120.0
    stop_seconds: float = 15.0
    # How often its first start is attempted. An orchestrator may crash on a job that it resumes,
    # until it has set that job aside.
    start_attempts: int = 1
    # Deaths within two minutes after which it is given up, and the longest pause before a restart.
    max_restarts: int = 6
    max_backoff_seconds: float = 8.0


def service_names(settings: ClusterSettings) -> list[str]:
    """Names of the Python services in the order in which they start."""
    names = [*CORE]
    names += [f"rollout-{i}" for i in range(settings.rollouts)]
    names += [f"trainer-{i}" for i in range(settings.trainers)]
    if settings.panel:
        names.append("control_panel")
    return names


def port_names(settings: ClusterSettings) -> list[str]:
    """Names of the ports that a cluster needs: of every service, and of its metrics."""
    names = [] if settings.redis_url else ["redis"]
    for service in service_names(settings):
        names += [service, f"{service}/metrics"]
    return names


def links(settings: ClusterSettings) -> list[tuple[str, str]]:
    """Every (caller, callee) that a route may redirect; `ANYBODY` is the caller of workers."""
    found: list[tuple[str, str]] = []
    for name in service_names(settings):
        module, _, _ = name.partition("-")
        callees = [c for c in _CALLS[module] if c != "redis" or settings.redis_url is None]
        found += [(name, callee) for callee in callees]
        if module in _WORKERS:
            found.append((ANYBODY, name))
    return found


def thread_budget(settings: ClusterSettings, cores: int) -> int:
    """Threads of one rollout or trainer worker.

    In sum at most the cores: two spinning thread pools on one core slow each other down by an
    order of magnitude.
    """
    if settings.threads is not None:
        return settings.threads
    return max(1, cores // (settings.rollouts + settings.trainers))


def plan(
    settings: ClusterSettings,
    ports: Mapping[str, int],
    *,
    redis_url: str,
    redis_command: tuple[str, ...] = (),
    token: SecretStr | None = None,
    cluster_id: str,
    parent_pid: int,
    routes: Routes = MappingProxyType({}),
    cores: int | None = None,
) -> list[ChildSpec]:
    """The children of a cluster in an order that respects `after`.

    `settings` are resolved; `ports` has one per `port_names`; `redis_command` is empty when the
    Redis at `redis_url` runs already; services require and send `token` (None: none). Callers reach
    callees directly unless `routes` has another address.
    """
    children: list[ChildSpec] = []
    base = _shared_environment(settings, ports, redis_url, token, parent_pid)
    if redis_command:
        children.append(
            ChildSpec(
                name="redis",
                command=redis_command,
                probe=Probe(ProbeKind.REDIS, redis_url),
                address=f"{LOOPBACK}:{ports['redis']}",
                start_seconds=settings.start_seconds,
                stop_seconds=settings.stop_seconds,
                max_restarts=settings.max_restarts,
                max_backoff_seconds=settings.max_backoff_seconds,
            )
        )
    budget = thread_budget(settings, cores or os.cpu_count() or 1)
    for name in service_names(settings):
        module, _, _ = name.partition("-")
        threads = budget if module in _WORKERS else 1
        if module == "trainer" and settings.trainer_threads is not None:
            threads = settings.trainer_threads
        port, metrics_port = ports[name], ports[f"{name}/metrics"]
        address = f"{LOOPBACK}:{port}"
        children.append(
            ChildSpec(
                name=name,
                command=(sys.executable, "-m", f"services.{module}"),
                probe=Probe(
                    ProbeKind.HTTP if module == "control_panel" else ProbeKind.GRPC, address
                ),
                address=address,
                metrics_address=f"{LOOPBACK}:{metrics_port}",
                environment={
                    **base,
                    **_redirected(name, module, base, routes),
                    **thread_environment(threads),
                    "TROUPE_PORT": str(port),
                    "TROUPE_METRICS_PORT": str(metrics_port),
                    "TROUPE_WORKER_ID": f"{name}-{cluster_id}",
                },
                after=_dependencies(module, embedded_redis=bool(redis_command)),
                start_attempts=_ORCHESTRATOR_ATTEMPTS if module == "orchestrator" else 1,
                start_seconds=settings.start_seconds,
                stop_seconds=settings.stop_seconds,
                max_restarts=settings.max_restarts,
                max_backoff_seconds=settings.max_backoff_seconds,
            )
        )
    return children


def _dependencies(module: str, *, embedded_redis: bool) -> tuple[str, ...]:
    redis = ("redis",) if embedded_redis else ()
    return {
        "experience_store": redis,
        "reward": (),
        "orchestrator": redis,
        "rollout": CORE,
        "trainer": ("experience_store", "orchestrator"),
        "control_panel": ("orchestrator",),
    }[module]


def _shared_environment(
    settings: ClusterSettings,
    ports: Mapping[str, int],
    redis_url: str,
    token: SecretStr | None,
    parent_pid: int,
) -> dict[str, str]:
    assert settings.transfer_dir is not None  # ClusterSettings.resolved
    return {
        "TROUPE_HOST": LOOPBACK,
        "TROUPE_REDIS_URL": redis_url,
        "TROUPE_ORCHESTRATOR_ADDRESS": f"{LOOPBACK}:{ports['orchestrator']}",
        "TROUPE_EXPERIENCE_STORE_ADDRESS": f"{LOOPBACK}:{ports['experience_store']}",
        "TROUPE_REWARD_ADDRESS": f"{LOOPBACK}:{ports['reward']}",
        "TROUPE_DATA_DIR": str(settings.data_dir),
        "TROUPE_TRANSFER_DIR": str(settings.transfer_dir),
        "TROUPE_TRANSFER_FALLBACK_DIR": str(transfer_fallback_dir(settings.data_dir)),
        "TROUPE_PARENT_PID": str(parent_pid),
        # Hosts that Slurm gave this job are no gang of an embedded cluster's trainer.
        "TROUPE_GANG_NODES": os.environ.get("TROUPE_GANG_NODES", "1"),
        "TROUPE_LOG_FORMAT": "json",  # as `logs.last_line` expects
        "PYTHONPATH": python_path(Path.cwd(), os.environ.get("PYTHONPATH", "")),
        "PYTHONUNBUFFERED": "1",
        **settings.environment,
        **({} if token is None else {TOKEN_VARIABLE: token.get_secret_value()}),
    }


def _redirected(name: str, module: str, base: Mapping[str, str], routes: Routes) -> dict[str, str]:
    """The address variables of the service `name` that `routes` changes."""
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
    """`directory` first, so that the workflow modules of the user's project import."""
    return os.pathsep.join([str(directory), *(p for p in inherited.split(os.pathsep) if p)])


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that bound the thread pools of numerical libraries, which else use all cores."""
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
        # glibc keeps an arena per thread: tens of MiB each that are never given back. Threads that
        # compute side by side wait for each other where they share one.
        "MALLOC_ARENA_MAX": str(threads + 1),
    }
