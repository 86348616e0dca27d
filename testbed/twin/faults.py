"""Failures in the twin: environments that break, nodes with exponential lives."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import simpy

from troupe.scheduling.binding import RankWorker
from troupe.twin.trainers import TrainingPool
from troupe.twin.workload import TwinTrajectory


class FailingTrajectory(TwinTrajectory):
    """A trajectory whose environment breaks at the end of its last turn: it runs again, once."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NodeFaults:
    """Failures of rollout and trainer workers: exponential, `mtbf_seconds` for each of them."""

    mtbf_seconds: float
    down_seconds: float = 300.0
    restart_seconds: float = 0.0
    """Additional time of a gang that has lost a rank, for processes, groups and its last state."""
    seed: int = 0


class FailingTrainers(TrainingPool):
    """Trainer workers that die and come back."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[RankWorker],
        *,
        changed: Any,
        restart_seconds: float,
        spans: list[tuple[str, str, float, float, float]] | None = None,
    ) -> None:
        """`restart_seconds`: time that a gang needs after the loss of a rank before it computes
        again."""
        super().__init__(env, workers, changed=changed, spans=spans)
        self._restart = restart_seconds
        # Policies whose gang lost a rank and has to be built again.
        self._broken: set[str] = set()

    def lose(self, worker_id: str) -> None:
        """Kill a worker: its gangs lose their gradients, and the rows are claimed again."""
        for lease in self._leases.values():
            if worker_id in lease.bound:
                lease.bound, lease.suspending, lease.near = (), False, ()
                self._broken.add(lease.name)
                if lease.table is not None and lease.rows:
                    rows, lease.rows, lease.accumulated = lease.rows, [], 0
                    lease.table.give_back(rows)
                lease.tell(self._env)
        self.workers.pop(worker_id, None)
        self.touch()

    def join(self, worker: RankWorker) -> None:
        """Restore a lost worker."""
        self.workers[worker.worker_id] = worker
        self.touch()

    def rebuilding_seconds(self, policy: str) -> float:
        """Return the time that the policy's gang needs after the loss of a rank."""
        if policy not in self._broken:
            return 0.0
        self._broken.remove(policy)
        return self._restart


class FailingCluster(Protocol):
    """A cluster that can fail, such as `testbed.twin.cluster.PublishedTwin`."""

    @property
    def routers(self) -> Sequence[Any]:
        """One entry per rollout worker."""

    def lose_worker(self, worker: int) -> bool:
        """Kill a rollout worker, unless it is indispensable."""

    def restore_worker(self, worker: int) -> None:
        """Restore the rollout worker."""

    def lose_trainer(self, trainer: RankWorker) -> None:
        """Kill a trainer worker."""

    def restore_trainer(self, trainer: RankWorker) -> None:
        """Restore the trainer worker."""


def start_faults(
    env: simpy.Environment,
    cluster: FailingCluster,
    trainers: Sequence[RankWorker],
    faults: NodeFaults,
) -> None:
    """Let rollout workers and trainer workers die and come back from now on."""

    def worker_of(number: int) -> tuple[Callable[[], object], Callable[[], None]]:
        return lambda: cluster.lose_worker(number), lambda: cluster.restore_worker(number)

    def trainer_of(one: RankWorker) -> tuple[Callable[[], object], Callable[[], None]]:
        return lambda: cluster.lose_trainer(one), lambda: cluster.restore_trainer(one)

    for number in range(len(cluster.routers)):
        env.process(_life(env, f"rollout/{number}", faults, *worker_of(number)))
    for trainer in trainers:
        env.process(_life(env, trainer.worker_id, faults, *trainer_of(trainer)))


def _life(
    env: simpy.Environment,
    name: str,
    faults: NodeFaults,
    die: Callable[[], object],
    revive: Callable[[], None],
) -> Generator[simpy.Event, Any, None]:
    rng = random.Random(f"{faults.seed}/{name}")
    while True:
        yield env.timeout(rng.expovariate(1 / faults.mtbf_seconds))
        if die() is False:
            continue
        yield env.timeout(faults.down_seconds)
        revive()
