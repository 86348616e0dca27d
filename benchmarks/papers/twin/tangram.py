"""ARL-Tangram's effect on training steps (arXiv 2603.13019): coding agents whose commands, tests
and rewards run on a cluster of cores, together with the engines and trainers of the same job.

Published: 15 hosts of 256 cores, a batch of 1,280, and steps with static pods that take 1.4 times
(coding) and 1.5 times (deep search) as long. Model and devices are unpublished and assumed here,
like the trace (testbed/simulator/trace.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import simpy

from benchmarks.papers.actions import simulated
from benchmarks.papers.twin.rollart import training_hosts
from testbed.simulator.trace import CodingLaw, Trajectory, coding
from testbed.twin.actions import CORES, ActingTurn, ActionPool, ElasticPool, Learned, Pods
from testbed.twin.cluster import PublishedJob, PublishedTwin
from troupe.scheduling.elastic import Discipline
from troupe.scheduling.elastic.order import SHORTEST
from troupe.twin.costs import DEVICES, engine_rates, model_shape, trainer_rates
from troupe.twin.job import ControlPlane, EngineFleet, TwinPolicy
from troupe.twin.workload import TwinTrajectory

PUBLISHED: Final = 1.4
BATCH: Final = 1280
# Assumed: hosts of eight H800, all of which generate, then train.
_MODEL: Final = "Qwen3-32B"
_DEVICE: Final = "H800"
_HOSTS: Final = 16
_TENSOR: Final = 4
_LIMIT: Final = 64
_CONTEXT: Final = 16_000.0
# Tokens of the task, and of the average output of a command or test (assumed).
_QUESTION, _OUTPUT = 2000, 500
# The rate behind the trace's seconds of generation: tokens/s of one turn on a half-full engine
# (engine_rates gives 45 at 32 turns of 16,000 tokens).
_TOKENS_PER_SECOND: Final = 45.0
_SWITCH_SECONDS: Final = 11.0  # from rollout to training and back: FlexMARL's, for 32B

# Conversations are cut at this length, since agents compact them.
_LONGEST: Final = 100_000

CODING: Final = CodingLaw()
POOLS: Final = {
    "pods": "a pod of 16 cores for each trajectory",
    "elastic": "actions one by one",
    "enough": "eight cores for every action at once",
}


@dataclass(frozen=True)
class CodingStep:
    """Seconds of a step and of its rollout, mean seconds of its actions, waits included, and the
    busy fraction of engines."""

    seconds: float
    rollout: float
    act: float
    engines: float


class CodingWorkload:
    """Queries of coding agents: the trace's generation as tokens, its actions as calls."""

    def __init__(self, law: CodingLaw, seed: int = 1) -> None:
        self._law = law
        self._seed = seed

    def __call__(self, index: int) -> list[TwinTrajectory]:
        """Return the trajectories of a query."""
        size = self._law.group
        return [_trajectory(one) for one in coding(size, self._law, self._seed, first=index * size)]


def _trajectory(trace: Trajectory) -> TwinTrajectory:
    turns, shared, new = list[ActingTurn](), 0, _QUESTION
    for turn in trace:
        if shared > _LONGEST:
            shared, new = 0, _QUESTION
        response = max(1, round(turn.think * _TOKENS_PER_SECOND))
        turns.append(ActingTurn("agent", shared + new, response, shared=shared, call=turn.call))
        shared, new = shared + new + response, _OUTPUT
    return TwinTrajectory(tuple(turns))


def job(
    make: Callable[[simpy.Environment], ActionPool], batch: int = BATCH, law: CodingLaw = CODING
) -> PublishedJob:
    """Return the job whose devices alternate: all generate, then all train. `make`: the factory of
    the pool."""
    shape, device = model_shape(_MODEL), DEVICES[_DEVICE]
    engines = EngineFleet(
        8 // _TENSOR,
        engine_rates(shape, device, tensor_parallel=_TENSOR, context=_CONTEXT),
        _LIMIT,
        _TENSOR,
    )
    ranks = 8 * _HOSTS
    trainer = replace(trainer_rates(shape, device, ranks=ranks, context=_CONTEXT), swap_seconds=0.0)
    return PublishedJob(
        policies={"agent": TwinPolicy((engines,), trainer, ranks=ranks)},
        workload=CodingWorkload(law),
        trainers=training_hosts(_HOSTS),
        mode="sync",
        queries_per_step=batch // law.group,
        micro_batch=64,
        in_flight=batch,
        rollout_workers=_HOSTS,
        share_prefixes=True,
        switch_seconds=_SWITCH_SECONDS,
        control=ControlPlane(0.004, 0.004, 0.004, 0.02, 0.03),
        actions=make,
    )


def pool(kind: str, hosts: int = simulated.HOSTS) -> Callable[[simpy.Environment], ActionPool]:
    """Return the factory of a pool of `POOLS` on `hosts` hosts."""
    capacities = [{CORES: simulated.HOST_CORES}] * hosts
    if kind == "elastic":
        learned = Learned(Discipline(SHORTEST))
        return lambda env: ElasticPool(
            env, capacities, fractions=simulated.DECLARED, learned=learned
        )
    if kind == "enough":
        return lambda env: Pods(env, [{CORES: 8 * 100_000}], cores=8)
    return lambda env: Pods(
        env,
        capacities,
        cores=simulated.POD_CORES,
        parallelism=simulated.POD_PARALLELISM,
        start_seconds=simulated.POD_SECONDS,
        made_per_second=simulated.PODS_PER_SECOND,
    )


def step(kind: str, batch: int = BATCH, hosts: int = simulated.HOSTS) -> CodingStep:
    """Run one step with a pool of `POOLS`, after a step in which durations of actions are
    learned."""
    twin = PublishedTwin(job(pool(kind, hosts), batch))
    means = twin.run(2).means(1)
    (actions_before, seconds_before), (actions, seconds) = twin.acts
    return CodingStep(
        means.seconds,
        means.seconds - means.training_alone,
        (seconds - seconds_before) / (actions - actions_before),
        means.engines,
    )
