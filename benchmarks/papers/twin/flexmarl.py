"""FlexMARL's table (arXiv 2602.09578) at its own scale: 48 hosts of 16 devices, in the twin.

Published: hosts, devices, models, global batch 64, micro-batch 16, 4 queries of 16 trajectories at
once, skewed calls, a balancing threshold of 5 turns, 11 s to move a policy of 32B. Unpublished
values are in `Assumed` and the constants near it, fitted to the rows' ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from troupe.scheduling.balancing import BalancingRules
from troupe.scheduling.binding import RankWorker
from troupe.twin.cluster import Twin, TwinMeans
from troupe.twin.costs import DEVICES, engine_rates, model_shape, trainer_rates
from troupe.twin.job import ControlPlane, EngineFleet, TwinJob, TwinPolicy
from troupe.twin.workload import Lengths, TeamWorkload

AGENTS: Final = ("planner", "coder", "critic", "searcher", "writer")
HOSTS: Final = 48
_PER_HOST: Final = 16
_QUERIES: Final = 64
_GROUP: Final = 16
_LAYERS: Final = model_shape("Qwen3-14B").layers
# The paper's seconds per step.
PUBLISHED: Final = {
    "ma": {
        "serial": 914.4,
        "colocated": 174.1,
        "fixed": 152.2,
        "sync": 256.2,
        "flexmarl": 126.1,
    },
    "ca": {
        "serial": 438.6,
        "colocated": 112.8,
        "fixed": 95.9,
        "sync": 124.1,
        "flexmarl": 78.8,
    },
}
ROWS: Final = {
    "serial": "MAS-RL: colocated, query after query, policy after policy",
    "colocated": "MARTI: all devices generate, then each policy's devices train",
    "sync": "without the asynchronous pipeline",
    "fixed": "without load balancing",
    "flexmarl": "FlexMARL",
}


@dataclass(frozen=True)
class Assumed:
    """Unpublished values of a set-up: seven numbers and the set of large policies, found by a
    search over the twin (docs/benchmarks/twin.md)."""

    large: tuple[str, ...]
    """Policies of 32B; the others have 14B."""
    rounds: float
    response: float
    """Tokens per turn: 910 tokens/s in steps of 126 s are 112 per trajectory (MA)."""
    wait: float
    wait_sigma: float
    prompt: float
    micro_batch: float
    """Fixed seconds per micro-batch of 14B: launches, collectives, rows."""


SETUPS: Final = {
    "ma": Assumed((), 1.437, 37.0, 0.942, 1.056, 1725.0, 0.288),
    "ca": Assumed(("coder",), 1.377, 32.1, 0.147, 0.924, 500.0, 0.2),
}
# Assumed in both: engines of each policy (twice as many if engines have all devices), their
# devices, and the concurrent turns of each.
_INSTANCES: Final = 2
_ENGINE_DEVICES: Final = 4
_LIMIT: Final = 5
# Published: a policy of 32B moves off its devices, or onto them, in about 11 s.
_SWAP_SECONDS: Final = 11.0 / model_shape("Qwen3-32B").parameters
# A micro-batch has 16 rows, each of which half a host computes: more devices do not shorten it. The
# training pool is one such gang, on which policies alternate by micro-batch.
_GANG_HOSTS: Final = 8


def job(name: str, row: str) -> TwinJob:
    """Return the job of one row of the table."""
    given = SETUPS[name]
    device = DEVICES["910B"]
    together = row in ("serial", "colocated")
    instances = _INSTANCES * (2 if together else 1)
    hosts = HOSTS if together else _GANG_HOSTS
    ranks = _GANG_HOSTS * _PER_HOST
    context = given.prompt + given.response
    policies = {}
    for agent in AGENTS:
        shape = model_shape("Qwen3-32B" if agent in given.large else "Qwen3-14B")
        engine = engine_rates(shape, device, tensor_parallel=_ENGINE_DEVICES, context=context)
        trainer = trainer_rates(shape, device, ranks=ranks, context=context)
        policies[agent] = TwinPolicy(
            (EngineFleet(instances, engine, limit=_LIMIT, devices=_ENGINE_DEVICES),),
            replace(
                trainer,
                micro_batch_seconds=given.micro_batch * shape.layers / _LAYERS,
                swap_seconds=_SWAP_SECONDS * shape.parameters,
            ),
            ranks=ranks,
            state_bytes=int(16 * shape.parameters / ranks),
        )
    workload = TeamWorkload(
        agents=AGENTS,
        lead=AGENTS[0],
        skew=1.0,
        rounds=Lengths(given.rounds, 0.3),
        prompt=Lengths(given.prompt, 0.3),
        response=Lengths(given.response, 0.8, 8192),
        wait=Lengths(given.wait, given.wait_sigma),
        group_size=_GROUP,
        history=0.0,
    )
    trainers = [
        RankWorker(
            f"t{n:02}",
            memory=device.memory,
            device="npu",
            devices=_PER_HOST,
            host=f"h{n:02}",
        )
        for n in range(hosts)
    ]
    balancing = None
    if row not in ("fixed", "serial", "colocated"):
        balancing = BalancingRules(threshold=5.0, hysteresis=1.0, cooldown_seconds=5.0)
    mode = {"serial": "serial", "colocated": "sync", "sync": "sync"}.get(row, "micro_batch")
    swaps = [one.trainer.swap_seconds for one in policies.values()]
    switch = {"serial": sum(swaps), "colocated": max(swaps)}.get(row, 0.0)
    return TwinJob(
        policies=policies,
        workload=workload,
        trainers=trainers,
        mode=mode,  # type: ignore[arg-type]
        queries_per_step=_QUERIES,
        micro_batch=_GROUP,
        in_flight=4 * _GROUP,
        balancing=balancing,
        switch_seconds=switch,
        control=ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1),
    )


def table(name: str, *, quick: bool = False) -> dict[str, TwinMeans]:
    """Return the means of every row after the first of four steps; `quick`: of two rows and two
    steps."""
    rows = ("fixed", "flexmarl") if quick else tuple(ROWS)
    steps = 2 if quick else 4
    return {row: Twin(job(name, row)).run(steps).means(1) for row in rows}
