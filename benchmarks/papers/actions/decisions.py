"""The time of one decision in a full cluster with a long queue, as actions end and arrive."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from troupe.scheduling.elastic import Action, Host, Running, SpeedUp, decide_over

CORES, WORKERS, MEMORY = "cores", "workers", "memory_mib"
_HOSTS, _CAPACITY = 15, {CORES: 256, WORKERS: 256, MEMORY: 1 << 20}
_FUNCTIONS, _LEVELS = 8, tuple(range(1, 65))


@dataclass
class _Machine:
    free: dict[str, int]
    running: dict[str, Running] = field(default_factory=dict)


def decision_seconds(queued: int, decisions: int, seed: int) -> tuple[list[float], float]:
    """Return the CPU seconds of each of `decisions` decisions with `queued` actions of 64 levels
    waiting on 15 hosts of 256 cores, and of the first decision, which fills the empty cluster."""
    rng = np.random.default_rng(seed)
    curves = [SpeedUp(f, 60.0) for f in rng.uniform(0.7, 0.99, _FUNCTIONS)]
    machines = {str(i): _Machine(dict(_CAPACITY)) for i in range(_HOSTS)}
    names, now, queue = count(), 0.0, list[Action]()
    ends: list[tuple[float, str, str]] = []
    spent: list[float] = []

    def come() -> None:
        which = int(rng.integers(_FUNCTIONS))
        elastic = curves[which].elastic(CORES, _LEVELS)
        needs = {WORKERS: 1, MEMORY: 512}
        function, name = f"f{which}", f"{next(names):09}"
        queue.append(Action(name, now, needs, elastic, 1.0, function))

    def decide() -> None:
        hosts = [
            Host(name, m.free, m.running.values(), _warm(), capacity=_CAPACITY)
            for name, m in machines.items()
        ]
        began = time.process_time()
        grants = decide_over(hosts, queue, now)
        spent.append(time.process_time() - began)
        started = {grant.action.action_id for grant in grants}
        queue[:] = [action for action in queue if action.action_id not in started]
        for grant in grants:
            # No action takes exactly its expected time.
            end = now + grant.seconds * float(rng.lognormal(-0.32, 0.8))
            machine, name = machines[grant.host], grant.action.action_id
            machine.running[name] = Running(grant.holds, now + grant.seconds)
            heapq.heappush(ends, (end, grant.host, name))
            for resource, amount in grant.holds.items():
                machine.free[resource] -= amount
        while len(queue) < queued:
            come()

    for _ in range(queued):
        come()
    decide()
    for _ in range(decisions):
        now, host, name = heapq.heappop(ends)
        machine = machines[host]
        for resource, amount in machine.running.pop(name).holds.items():
            machine.free[resource] += amount
        decide()
    return spent[1:], spent[0]


def _warm() -> Sequence[str]:
    return [f"f{which}" for which in range(_FUNCTIONS)]
