"""The published set-ups in simulated time: 15 hosts of 256 cores; 9 model services of 4 GPUs.

The decisions come from the services (`troupe.scheduling.elastic`); hosts, tools and models are
modelled (`simulator`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from benchmarks.command import quantile
from testbed.simulator.models import Dedicated, ServedModel, SharedPool
from testbed.simulator.rollout import BatchResult, ask, play
from testbed.simulator.trace import (
    TESTS,
    CodingLaw,
    ServiceRequest,
    TeacherLaw,
    Trajectory,
    coding,
    teaching,
)
from testbed.twin.actions import CORES, REWARD, ElasticPool, Learned, Pods
from troupe.scheduling.elastic import Discipline
from troupe.scheduling.elastic.order import FCFS, SHORTEST, Order

HOSTS, HOST_CORES = 15, 256
# Cores that a pod of the baseline reserves, and that its test runner uses.
POD_CORES, POD_PARALLELISM = 16, 2
# Seconds until a pod is ready, and pods that the control plane makes per second (the default
# request rate of Kubernetes' controllers).
POD_SECONDS, PODS_PER_SECOND = 2.0, 20.0
# A user's guess; the truth is `CodingLaw.parallel_fraction`.
DECLARED = {TESTS: 0.9, REWARD: 0.9}
SERVICES, SERVICE_GPUS, RESTORE_SECONDS = 9, 4, 1.0
# A shared pool counts as fast as dedicated devices up to this ratio of means, which allows for the
# overhead of restoring that ARL-Tangram reports, about a quarter.
AS_FAST = 1.25
# The trajectories for learning have other seeds than the measured ones.
_OTHERS = 1000


def elastic(
    trajectories: Sequence[Trajectory],
    hosts: Sequence[int],
    *,
    order: Order = SHORTEST,
    told: bool = False,
    before: Sequence[Trajectory] = (),
) -> BatchResult:
    """Play actions scheduled one by one on hosts with these cores. `told`: each action's duration
    is known at its request. `before`: trajectories that were played, and learned from, in
    advance."""
    capacities = [{CORES: cores} for cores in hosts]
    learned = Learned(Discipline(order))

    def make(env: simpy.Environment) -> ElasticPool:
        return ElasticPool(env, capacities, fractions=DECLARED, learned=learned, told=told)

    if before:
        play(before, make)
    return play(trajectories, make)


def fixed(trajectories: Sequence[Trajectory], hosts: Sequence[int], cores: int) -> BatchResult:
    """Play the same, but every elastic action gets `cores` cores."""
    capacities = [{CORES: each} for each in hosts]
    return play(
        trajectories,
        lambda env: ElasticPool(env, capacities, fixed=cores, fractions=DECLARED),
    )


def reserved(
    trajectories: Sequence[Trajectory],
    hosts: Sequence[int],
    *,
    pod: int = POD_CORES,
    parallelism: int = POD_PARALLELISM,
    kubernetes: bool = True,
    held_by: int = 1,
) -> BatchResult:
    """Play with a pod for every trajectory; `kubernetes`: making a pod takes time. `held_by`:
    number of neighbouring trajectories (a query's group) whose pods are kept until all of them have
    ended."""
    capacities = [{CORES: cores} for cores in hosts]

    def make(env: simpy.Environment) -> Pods:
        if not kubernetes:
            return Pods(env, capacities, cores=pod, parallelism=parallelism)
        return Pods(
            env,
            capacities,
            cores=pod,
            parallelism=parallelism,
            start_seconds=POD_SECONDS,
            made_per_second=PODS_PER_SECOND,
        )

    return play(trajectories, make, held_by=held_by)


def least(trajectories: Sequence[Trajectory], cores: int) -> float:
    """Return a lower bound in seconds for the mean ACT of all schedules on `cores` cores.

    A trajectory consists of thinking and of actions with their waits, so that the sum of ACTs is
    the sum of ends less all thinking. No end comes earlier than on one machine that does `cores`
    core-seconds per second without waiting for thinking; there the shortest-first order has the
    smallest sum of ends (Smith 1956). Nor is an action shorter than on all cores.
    """
    actions = sum(map(len, trajectories))
    works = sorted(sum(t.call.serial + t.call.parallel for t in turns) for turns in trajectories)
    ends = sum(itertools.accumulate(work / cores for work in works))
    think = sum(turn.think for turns in trajectories for turn in turns)
    alone = sum(turn.call.seconds(cores) for turns in trajectories for turn in turns)
    return max(ends - think, alone) / actions


@dataclass(frozen=True)
class Several:
    """Gains over reservations of one core, as means of several draws: in the services' order after
    learning from a batch; first come, first served; with known durations; the maximum for any
    schedule; and in the services' order for repeated queries.
    """

    cores: int
    elastic: float
    fcfs: float
    told: float
    most: float
    again: float


def several(cores: int, count: int, law: CodingLaw, seeds: Sequence[int]) -> Several:
    """Measure `count` trajectories of `law` on one host, drawn once for each seed."""
    gains: list[tuple[float, ...]] = []
    for seed in seeds:
        trajectories, before = coding(count, law, seed), coding(count, law, seed + _OTHERS)
        static = reserved(trajectories, [cores], pod=1, parallelism=1, kubernetes=False).act
        ours = elastic(trajectories, [cores], before=before).act
        fcfs = elastic(trajectories, [cores], order=FCFS, before=before).act
        told = elastic(trajectories, [cores], told=True, before=before).act
        again = ours
        if law.alike:
            first = coding(count, law, seed, epoch=1)
            again = elastic(trajectories, [cores], before=[*before, *first]).act
        acts = (ours, fcfs, told, least(trajectories, cores), again)
        gains.append(tuple(static / act for act in acts))
    means = [sum(column) / len(gains) for column in zip(*gains, strict=True)]
    return Several(cores, *means)


def tight(trajectories: Sequence[Trajectory]) -> BatchResult:
    """Play with reservations of exactly the used cores, one for every trajectory at once."""
    cores = POD_PARALLELISM * len(trajectories)
    return reserved(trajectories, [cores], pod=POD_PARALLELISM, kubernetes=False)


@dataclass(frozen=True)
class Batch:
    """One size of batch; `static` is None if it was not played."""

    trajectories: int
    elastic: BatchResult
    static: BatchResult | None

    @property
    def gain(self) -> float:
        """Ratio of the actions' time with reservations."""
        assert self.static is not None
        return self.static.act / self.elastic.act


def batches(sizes: Sequence[int], beyond: Sequence[int], law: CodingLaw, seed: int) -> list[Batch]:
    """Play `sizes` elastic and static, and the sizes in `beyond` only elastic."""
    hosts = [HOST_CORES] * HOSTS
    trajectories = coding(max((*sizes, *beyond)), law, seed)
    found = []
    for size in sorted({*sizes, *beyond}):
        part = trajectories[:size]
        static = reserved(part, hosts) if size in sizes else None
        found.append(Batch(size, elastic(part, hosts), static))
    return found


def cores_for(
    act: float, trajectories: Sequence[Trajectory], unit: int, most: int
) -> tuple[int, BatchResult]:
    """Return the smallest host, in steps of `unit` cores and up to `most`, on which actions take at
    most `act` seconds."""
    low, high, best = 0, most // unit, elastic(trajectories, [most])
    while high - low > 1:
        middle = (low + high) // 2
        tried = elastic(trajectories, [unit * middle])
        if tried.act <= act:
            high, best = middle, tried
        else:
            low = middle
    return high * unit, best


@dataclass(frozen=True)
class Pool:
    """Calls of model services on `gpus` GPUs; `restores`: models restored per call."""

    gpus: int
    mean: float
    p99: float
    restores: float = 0.0


def pools(
    sizes: Sequence[int],
    steps: int,
    law: TeacherLaw,
    seed: int,
    *,
    gpus: Sequence[int] = (SERVICE_GPUS,) * SERVICES,
) -> tuple[Pool, list[Pool]]:
    """Play every service on its own devices, and all on shared ones; `gpus`: numbers of shared
    devices."""
    calls = teaching(steps, law, seed)
    services = [ServedModel(f"teacher-{i}", count) for i, count in enumerate(gpus)]
    names = [service.name for service in services]

    def dedicated(env: simpy.Environment) -> Dedicated:
        return Dedicated(env, services)

    own = _pool(sum(gpus), ask(calls, names, dedicated))
    return own, [_shared(gpus, calls, services) for gpus in sizes]


def ideal(gpus: int, steps: int, law: TeacherLaw, seed: int) -> tuple[Pool, Pool]:
    """Return two lower bounds: evictions that know the future, and restores that take no time."""
    calls = teaching(steps, law, seed)
    services = [ServedModel(f"teacher-{i}", SERVICE_GPUS) for i in range(law.services)]
    foreseen = _shared(gpus, calls, services, foresight=True)
    return foreseen, _shared(gpus, calls, services, restore_seconds=0.0)


def _shared(
    gpus: int,
    calls: Sequence[ServiceRequest],
    services: Sequence[ServedModel],
    *,
    restore_seconds: float = RESTORE_SECONDS,
    foresight: bool = False,
) -> Pool:
    made: list[SharedPool] = []
    asked: dict[str, list[float]] = {service.name: [] for service in services}
    for call in calls:
        asked[services[call.service].name].append(call.at)

    def next_call(name: str, now: float) -> float:
        place = bisect.bisect_right(asked[name], now)
        return asked[name][place] if place < len(asked[name]) else calls[-1].at + 1.0

    def shared(env: simpy.Environment) -> SharedPool:
        made.append(
            SharedPool(
                env,
                services,
                devices=gpus,
                restore_seconds=restore_seconds,
                next_call=next_call if foresight else None,
            )
        )
        return made[0]

    played = ask(calls, [service.name for service in services], shared)
    return _pool(gpus, played, made[0].restores / len(calls))


def _pool(gpus: int, played: BatchResult, restores: float = 0.0) -> Pool:
    return Pool(gpus, played.act, quantile(played.acts, 0.99), restores)


def enough(own: Pool, shared: Sequence[Pool]) -> Pool | None:
    """Return the smallest pool that is as fast as dedicated devices."""
    return next((pool for pool in shared if pool.mean <= AS_FAST * own.mean), None)
