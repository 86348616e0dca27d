"""Static Kubernetes pods, one reserved per trajectory: the baseline of elastic scheduling.

A trajectory waits for a pod of its own (first come, first served), holds all of its cores until it
ends, and runs every action in it, as parallel as its image is set to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from testbed.simulator.trace import SimulatedAction
from troupe.scheduling.elastic import Amounts


class Pods:
    """Pods of `cores` on hosts; the control plane makes so many per second."""

    def __init__(
        self,
        env: simpy.Environment,
        hosts: Sequence[Amounts],
        *,
        cores: int,
        parallelism: int | None = None,
        start_seconds: float = 0.0,
        made_per_second: float = float("inf"),
    ) -> None:
        """`parallelism`: cores that an action uses of the pod's; None: all. `start_seconds`: from
        being made to being ready. Raises ValueError where no pod fits."""
        places = sum(host["cores"] // cores for host in hosts)
        if not places:
            raise ValueError(f"cores = {cores}: no host has so many")
        self._env = env
        self._cores = min(cores, parallelism or cores)
        self._start_seconds = start_seconds
        self._interval = 1.0 / made_per_second
        self._next = 0.0
        self._places = simpy.Resource(env, places)
        self.core_seconds = 0.0
        # Of all trajectories, for a pod.
        self.waited = 0.0

    def reserve(self) -> Generator[simpy.Event, Any, simpy.Event]:
        """Waits for a pod and returns it."""
        asked = self._env.now
        request = self._places.request()
        yield request
        made = self._next = max(self._next, self._env.now) + self._interval
        yield self._env.timeout(made - self._env.now + self._start_seconds)
        self.waited += self._env.now - asked
        return request

    def release(self, pod: Any) -> None:
        """Frees the pod of an ended trajectory."""
        self._places.release(pod)

    def run(self, call: SimulatedAction) -> Generator[simpy.Event, Any, None]:
        """Runs one action in a pod."""
        seconds = call.seconds(self._cores)
        self.core_seconds += seconds * min(self._cores, call.max_cores)
        yield self._env.timeout(seconds)
