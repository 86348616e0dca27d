"""The picture of a cluster that `Client.cluster()` returns."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.client.records import word
from troupe.v1 import common_pb2
from troupe.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class Worker:
    """A rollout or trainer process."""

    id: str
    kind: str
    address: str
    alive: bool
    seconds_since_heartbeat: float
    doing: str
    rss_bytes: int
    # Of trainers: policies that it may hold at once (0: any number), and the fraction of the last
    # seconds in which it computed.
    slots: int | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class Engine:
    """One serving replica of one policy."""

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


@dataclass(frozen=True)
class Binding:
    """A policy holding training devices, or waiting for some (`suspended`)."""

    job_id: str
    policy: str
    state: str
    version: int
    step: int
    samples: int
    # Suspended elsewhere, its state is ready here.
    prefetched: bool = False
    # How often it came to this worker or left, and the seconds that this kept its device idle.
    swaps: int = 0
    swap_seconds: float = 0.0


@dataclass(frozen=True)
class Service:
    """One service as the orchestrator sees it."""

    name: str
    address: str
    serving: bool
    message: str


@dataclass(frozen=True)
class Cluster:
    """What every part of a cluster does now."""

    workers: tuple[Worker, ...]
    engines: tuple[Engine, ...]
    bindings: tuple[Binding, ...]
    services: tuple[Service, ...]
    # Trajectories admitted and not ended, per job.
    in_flight: dict[str, int]
    # Trainer workers with which no policy would wait for another; 0: nobody needs one.
    wanted_trainers: int = 0

    @classmethod
    def of(cls, reply: pb.GetClusterResponse) -> Cluster:
        """From the wire."""
        return cls(
            workers=tuple(
                Worker(
                    id=w.worker_id,
                    kind=word(pb.WorkerKind, w.kind),
                    address=w.address,
                    alive=w.alive,
                    seconds_since_heartbeat=w.seconds_since_heartbeat,
                    doing=w.doing,
                    rss_bytes=w.rss_bytes,
                    slots=w.trainer.slots if w.HasField("trainer") else None,
                    utilization=w.trainer.utilization if w.HasField("trainer") else None,
                )
                for w in reply.workers
            ),
            engines=tuple(
                Engine(
                    id=e.engine_id,
                    job_id=e.job_id,
                    policy=e.policy,
                    kind=e.kind,
                    state=word(common_pb2.EngineState, e.state),
                    version=e.version if e.HasField("version") else None,
                    running=e.running,
                    waiting=e.waiting,
                    tokens_per_second=e.tokens_per_second,
                    worker_id=e.worker_id,
                    message=e.message,
                    restarts=e.restarts,
                    device_class=e.device_class,
                )
                for e in reply.engines
            ),
            bindings=tuple(
                Binding(
                    job_id=b.job_id,
                    policy=b.policy,
                    state=word(common_pb2.BindingState, b.state),
                    version=b.version,
                    step=b.step,
                    samples=b.samples,
                    prefetched=b.prefetched,
                    swaps=b.swaps,
                    swap_seconds=b.swap_seconds,
                )
                for b in reply.bindings
            ),
            services=tuple(
                Service(name=s.name, address=s.address, serving=s.serving, message=s.message)
                for s in reply.services
            ),
            in_flight=dict(reply.in_flight),
            wanted_trainers=reply.wanted_trainers,
        )
