"""Records of a cluster: workers, engines, bindings, services and nodes."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.client.conversion import Record


@dataclass(frozen=True)
class Worker(Record, id_from="worker_id", part="trainer"):
    """A rollout or trainer process."""

    id: str
    kind: str
    address: str
    alive: bool
    seconds_since_heartbeat: float
    doing: str
    rss_bytes: int
    # Trainers only: how many policies it may hold at once (0: any number), and the fraction of the
    # last seconds in which it computed.
    slots: int | None = None
    utilization: float | None = None
    # The node that started it; empty if none did.
    node: str = ""


@dataclass(frozen=True)
class Engine(Record, id_from="engine_id"):
    """One inference engine: a serving replica of one policy."""

    id: str
    job_id: str
    policy: str
    kind: str
    state: str
    version: int | None
    running: int
    waiting: int
    tokens_per_second: float
    worker_id: str
    message: str
    restarts: int
    device_class: str = ""
    # The last weight update: its transport, the seconds without service, and its total seconds.
    update_way: str = ""
    update_exposed_seconds: float = 0.0
    update_seconds: float = 0.0
    # What it shares with engines of other policies over the same base; empty: nothing.
    host: str = ""
    # Versions that are loaded: the one that serves, and those that running turns began with.
    live_versions: tuple[int, ...] = ()

    @property
    def versions(self) -> str:
        """The version that serves, and older ones that turns still use: `v5 (and v4)`."""
        served = "-" if self.version is None else f"v{self.version}"
        others = sorted(set(self.live_versions) - {self.version}, reverse=True)
        return f"{served} (and {', '.join(f'v{one}' for one in others)})" if others else served


@dataclass(frozen=True)
class Binding(Record):
    """A policy that holds training devices, or waits for them (`suspended`)."""

    job_id: str
    policy: str
    state: str
    version: int
    step: int
    samples: int
    # Suspended on another worker, with its training state already on this one.
    prefetched: bool = False
    # How often it was swapped in or out here, and how many seconds the device idled meanwhile.
    swaps: int = 0
    swap_seconds: float = 0.0
    # The current or last checkpoint: bytes written, and bytes in total.
    checkpoint_written_bytes: int = 0
    checkpoint_bytes: int = 0
    # While the ranks of a gang load the model: bytes loaded, and bytes in total.
    loaded_bytes: int = 0
    load_bytes: int = 0


@dataclass(frozen=True)
class Service(Record):
    """Health of one service, as the orchestrator sees it."""

    name: str
    address: str
    serving: bool
    message: str


@dataclass(frozen=True)
class NodeDevice(Record):
    """A device of a node."""

    index: int
    device_class: str
    memory_bytes: int
    # As reported by its driver; None for a declared device.
    used_bytes: int | None
    utilization: float | None
    # The process that has it; empty if none has.
    process: str
    # What computes on it: a trainer's "JOB/POLICY" or an engine's id.
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Node(Record, id_from="name"):
    """The supervisor of one host."""

    id: str
    host: str
    alive: bool
    seconds_since_heartbeat: float
    devices: tuple[NodeDevice, ...]


@dataclass(frozen=True)
class Cluster(Record):
    """Workers, engines, bindings and services of a cluster at the time of the call."""

    workers: tuple[Worker, ...]
    engines: tuple[Engine, ...]
    bindings: tuple[Binding, ...]
    services: tuple[Service, ...]
    # Trajectories in flight, per job.
    in_flight: dict[str, int]
    # The number of trainer workers at which no policy would wait for another.
    wanted_trainers: int = 0
    nodes: tuple[Node, ...] = ()
