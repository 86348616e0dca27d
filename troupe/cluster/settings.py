"""`ClusterSettings`: the settings of an embedded cluster, and its default directories."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from troupe.cluster.errors import NotUtf8
from troupe.cluster.inventory import NodeDevices, NodeShares, assign
from troupe.devices import DECLARED, Device, find_devices
from troupe.rpc.addresses import is_loopback_host, reachable_host
from troupe.rpc.settings import Host, Interface

LOOPBACK = "127.0.0.1"
DEFAULT_DATA_DIR = Path("runs")
DEFAULT_PANEL_PORT = 8080
DEFAULT_HEAD_PORT = 50051
Fsync = Literal["everysec", "always"]
Role = Literal["all", "head", "node"]


class ClusterSettings(BaseModel):
    """The settings of a supervisor: of a whole cluster on this machine, of a head, or of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    data_dir: Path = DEFAULT_DATA_DIR
    """Directory of jobs, checkpoints, logs, Redis' data and the cluster's state file."""
    jobs_dir: Path | None = None
    """Directory of jobs and checkpoints, if all hosts share one; default: `data_dir`."""
    transfer_dir: Path | None = None
    """Directory through which trainers pass weights to engines; default: `TROUPE_TRANSFER_DIR`,
    else one in shared memory."""
    role: Role = "all"
    """`head`: Redis, orchestrator, experience store, reward service and panel; `node`: workers on
    this host's devices; `all`: both, on loopback."""
    host: Interface = LOOPBACK
    """Interface to listen on."""
    advertise: Host | None = None
    """Name or address at which other hosts reach this one; default: `host`, or this machine's name
    if `host` is all interfaces."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the orchestrator; default: 50051 for a head, else a free one."""
    head: str | None = None
    """"host:port" of the head's orchestrator, for a node."""
    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=256)
    """Name of the node, unique in its cluster; default: the host's."""
    rollouts: int | None = Field(default=None, ge=1, le=64)
    """Number of rollout workers; default: one."""
    trainers: int | None = Field(default=None, ge=1, le=64)
    """Number of trainer workers; default: one, or as many as the devices allow."""
    devices: str = Field(
        default_factory=lambda: os.environ.get(DECLARED, ""), validate_default=True
    )
    """Devices to use instead of the driver's list, such as `8xH100-80GB` (default:
    `TROUPE_DEVICES`); CUDA_VISIBLE_DEVICES selects from either list."""
    engine_devices: int | None = Field(default=None, ge=0)
    """Number of devices for engines; default: half, rounded up."""
    trainer_devices: int | None = Field(default=None, ge=0)
    """Number of devices for trainers; default: the rest."""
    devices_per_trainer: int = Field(default=1, ge=1, le=64)
    """Number of devices per trainer worker: the size of the largest gang that it leads alone."""
    colocate: bool = False
    """Engines and trainers share all devices and take turns, for jobs with `pipeline.colocate`."""
    trainer_idle_seconds: float | None = Field(default=None, gt=0)
    """Seconds without demand for a trainer after which trainer processes end; they start again on
    demand. None: never."""
    panel: bool = True
    """Start the control panel."""
    panel_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the panel; default: 8080, or a free one if 8080 is taken."""
    redis_url: str | None = None
    """URL of a running Redis; default: the cluster starts an embedded one."""
    redis_fsync: Fsync = Field(
        default_factory=lambda: os.environ.get("TROUPE_REDIS_FSYNC", "always"),
        validate_default=True,
    )
    """When the embedded Redis' append-only file is flushed to disk: `everysec`, or `always`, before
    a write is answered (default: `TROUPE_REDIS_FSYNC`)."""
    redis_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the embedded Redis; default: a free one."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of each rollout and trainer worker; default: an equal share of the cores."""
    trainer_threads: int | None = Field(
        default_factory=lambda: os.environ.get("TROUPE_TRAINER_THREADS"),
        validate_default=True,
        ge=1,
    )
    """Threads of each trainer worker, if they differ from `threads` (default:
    `TROUPE_TRAINER_THREADS`). In an on-policy job, trainers and engines mostly take turns: on two
    cores, steps were a sixth shorter with all cores for the trainer
    (docs/benchmarks/end-to-end.md)."""
    start_seconds: float = Field(default=120, gt=0)
    """Time that a service may take to become healthy."""
    stop_seconds: float = Field(default=15, gt=0)
    """Time that a service may take to end before it is killed."""
    max_restarts: int = Field(default=6, ge=0)
    """Number of deaths within two minutes after which a service is given up."""
    max_backoff_seconds: float = Field(default=8, gt=0)
    """Longest pause before a dead service restarts."""
    environment: dict[str, str] = {}
    """Additional environment variables of every service."""

    def resolved(self) -> ClusterSettings:
        """Return these settings with absolute directories. Raises `NotUtf8` if the data directory's
        name is not UTF-8."""
        data_dir = require_utf8(self.data_dir.expanduser().absolute())
        named = os.environ.get("TROUPE_TRANSFER_DIR")
        transfer_dir = self.transfer_dir or (
            Path(named) if named else default_transfer_dir(data_dir)
        )
        return self.model_copy(
            update={
                "data_dir": data_dir,
                "jobs_dir": (self.jobs_dir or data_dir).expanduser().absolute(),
                "transfer_dir": transfer_dir.expanduser().absolute(),
            }
        )

    @property
    def reachable_host(self) -> str:
        """Name or address at which other processes reach this supervisor's services."""
        if is_loopback_host(self.host):
            return self.host
        return self.advertise or reachable_host(self.host)

    def inventory(self) -> tuple[Device, ...]:
        """Return the devices of this host. Raises `InvalidArgument` for an invalid declaration."""
        return find_devices({**os.environ, DECLARED: self.devices})

    @property
    def asked(self) -> NodeShares:
        """The shares of the devices that these settings ask for."""
        reward = self.environment.get("TROUPE_REWARD_GPUS", os.environ.get("TROUPE_REWARD_GPUS"))
        return NodeShares(
            self.engine_devices,
            self.trainer_devices,
            self.devices_per_trainer,
            int(reward) if reward and reward.isdecimal() and self.role != "node" else 0,
            self.rollouts,
            self.trainers,
            may_lack=self.role == "node",
            colocate=self.colocate,
        )

    def shares(self, devices: Sequence[Device]) -> NodeDevices:
        """Return the devices of each process. Raises `InvalidArgument`, which names the setting."""
        if self.role == "head":
            rewards = tuple(devices)[: self.asked.reward_devices]
            return NodeDevices((), (), rewards, known=bool(devices))
        return assign(devices, self.asked)


def require_utf8(data_dir: Path) -> Path:
    """Return `data_dir`. Raises `NotUtf8` unless its name is UTF-8."""
    try:
        str(data_dir).encode()
    except UnicodeEncodeError as error:
        raise NotUtf8(data_dir) from error
    return data_dir


def transfer_fallback_dir(data_dir: Path) -> Path:
    """Return the directory for weights and states when shared memory is full."""
    return data_dir / "transfer"


def default_transfer_dir(data_dir: Path) -> Path:
    """Return a shared-memory directory for this user and data directory; without /dev/shm, one of
    plain files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        return transfer_fallback_dir(data_dir)
    mark = hashlib.sha256(str(data_dir).encode()).hexdigest()[:8]
    return memory / f"troupe-{os.getuid()}-{mark}"
