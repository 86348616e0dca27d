"""The workers of all hosts together, as people and metrics see them."""

from __future__ import annotations

from services.reward.dispatch import Dispatcher
from services.reward.function import Function
from services.reward.metrics import Metrics
from services.reward.queues import CORES
from troupe.v1 import reward_pb2 as pb


class Pool:
    """Counts, asked for when they are read."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._queues = dispatcher.queues
        self._hosts = dispatcher.hosts
        watch = metrics.watch
        watch("queued", "Invocations that wait for a worker.", lambda: len(self._queues))
        watch("running", "Workers that run invocations.", lambda: self.busy)
        watch("workers", "Worker processes.", lambda: self.workers)
        watch("cores_held", "Cores that calls hold.", lambda: self.cores_held)
        watch("worker_restarts", "Workers replaced so far.", lambda: self.restarts)

    @property
    def workers(self) -> int:
        """Processes that are there, or being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def busy(self) -> int:
        """Calls that run at once now."""
        return sum(host.workers - host.free for host in self._hosts.values())

    @property
    def cores_held(self) -> int:
        """Cores that calls hold."""
        return sum(
            running.holds.get(CORES, 0)
            for host in self._hosts.values()
            for running in host.running.values()
        )

    @property
    def restarts(self) -> int:
        """Processes that had to be replaced so far."""
        return sum(host.restarts for host in self._hosts.values())

    def warm_for(self, function: Function) -> int:
        """Workers that have imported it and wait."""
        return sum(host.warm_for(function) for host in self._hosts.values())

    def status(self) -> pb.PoolStatus:
        """All of it as a message."""
        hosts = self._hosts.values()
        return pb.PoolStatus(
            workers=self.workers,
            busy=self.busy,
            max_workers=sum(host.workers for host in hosts),
            queued=len(self._queues),
            provisioned_seconds=sum(host.provisioned_seconds for host in hosts),
            busy_seconds=sum(host.busy_seconds for host in hosts),
        )
