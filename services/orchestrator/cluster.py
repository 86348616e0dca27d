"""One picture of what every service does now."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.orchestrator.binder import Binder
from services.orchestrator.job_store import JobStore
from services.orchestrator.workers import WorkerRegistry
from troupe.rpc import TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch

# Without a device; what is there may be of the past.
_AWAY: Final = frozenset({pb.BINDING_STATE_SUSPENDED, pb.BINDING_STATE_RELEASED})


class Cluster:
    """Sees the cluster: workers by their heartbeats, the other services by asking them."""

    def __init__(
        self,
        workers: WorkerRegistry,
        binder: Binder,
        store: JobStore,
        channels: Mapping[str, tuple[str, grpc.aio.Channel]],
        probe_seconds: float,
    ) -> None:
        self._workers = workers
        self._binder = binder
        self._store = store
        # Name of a service -> its address and a channel to it.
        self._channels = channels
        self._seconds = probe_seconds

    async def picture(self, in_flight: Counter[str]) -> orch.GetClusterResponse:
        """Workers, engines, bindings, services; `in_flight` trajectories per job."""
        services = await asyncio.gather(
            self._redis(), *(self._probe(name) for name in self._channels)
        )
        response = orch.GetClusterResponse(
            services=services, in_flight=in_flight, wanted_trainers=self._binder.wanted
        )
        for worker in self._workers.all():
            beat = worker.beat
            response.workers.add(
                worker_id=worker.worker_id,
                kind=worker.kind,
                address=worker.address,
                alive=worker.alive,
                seconds_since_heartbeat=self._workers.age(worker),
                doing="draining" if worker.alive and beat.draining else beat.doing,
                rss_bytes=beat.rss_bytes,
                trainer=beat.trainer if beat.HasField("trainer") else None,
            )
            if worker.alive:
                response.engines.extend(beat.engines)
                response.loads.extend(beat.loads)
                response.bindings.extend(beat.bindings)
        _forget_moved(response)
        return response

    async def _probe(self, name: str) -> orch.ServiceStatus:
        address, channel = self._channels[name]
        status = orch.ServiceStatus(name=name, address=address)
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=self._seconds
            )
        except TroupeError as error:
            status.message = str(error)
            return status
        status.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        if not status.serving:
            status.message = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        return status

    async def _redis(self) -> orch.ServiceStatus:
        status = orch.ServiceStatus(name="redis", address=self._store.address)
        try:
            async with asyncio.timeout(self._seconds):
                await self._store.ping()
            status.serving = True
        except (TroupeError, TimeoutError) as error:
            status.message = str(error) or f"no answer within {self._seconds:g} s"
        return status


def _forget_moved(response: orch.GetClusterResponse) -> None:
    """A worker where a policy was suspended does not hear that another has resumed it."""
    held = {(b.job_id, b.policy) for b in response.bindings if b.state not in _AWAY}
    kept = [
        b for b in response.bindings if b.state not in _AWAY or (b.job_id, b.policy) not in held
    ]
    del response.bindings[:]
    response.bindings.extend(kept)
