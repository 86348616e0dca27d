"""FlexMARL's table (arXiv 2602.09578) at its own scale: 48 hosts of 16 devices, in the twin.

Published: hosts, devices, models, global batch 64, micro-batch 16, 4 queries of 16 trajectories at
once, skewed calls, a balancing threshold of 5 turns. What is not published is in `Assumed`, chosen
by the seconds of the rows of FlexMARL itself and of FlexMARL without balancing; the others follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from troupe.scheduling.balancing import BalancingRules
from troupe.scheduling.binding import RankWorker
from troupe.twin.cluster import ControlPlane, EngineFleet, Twin, TwinJob, TwinMeans, TwinPolicy
from troupe.twin.costs import DEVICES, engine_rates, model_shape, trainer_rates
from troupe.twin.workload import Lengths, TeamWorkload

AGENTS: Final = ("planner", "coder", "critic", "searcher", "writer")
HOSTS: Final = 48
_PER_HOST: Final = 16
_QUERIES: Final = 64
_GROUP: Final = 16
# Seconds per step that the paper reports.
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
    "colocated": "MARTI: all devices generate, then all train",
    "sync": "without the asynchronous pipeline",
    "fixed": "without load balancing",
    "flexmarl": "FlexMARL",
}


@dataclass(frozen=True)
class Assumed:
    """What the paper does not say of a set-up."""

    large: tuple[str, ...]
    """Policies of 32B; the others are of 14B."""
    rounds: float
    response: float
    """Tokens per turn: 910 tokens/s in steps of 126 s are 112 per trajectory (MA)."""
    prompt: float
    wait: float
    wait_sigma: float
    instances: int
    """Engines of each policy, of `devices` devices."""
    devices: int
    limit: int
    """Turns that one engine runs at once. Chosen by the row without load balancing of MA."""
    micro_batch: float
    """Seconds of a micro-batch of 14B, launches and collectives included. Chosen so that training
    takes about as long as rollout."""


SETUPS: Final = {
    "ma": Assumed((), 1.33, 48.0, 600.0, 0.7, 1.0, 2, 4, 3, 1.25),
    "ca": Assumed(("critic", "searcher"), 1.33, 24.0, 600.0, 0.5, 1.25, 2, 4, 4, 0.5),
}


def job(name: str, row: str) -> TwinJob:
    """The job of one row of the table."""
    given = SETUPS[name]
    device = DEVICES["910B"]
    together = row in ("serial", "colocated")
    instances = given.instances * (2 if together else 1)
    hosts = HOSTS // (1 if together else 2)
    policies = {}
    for agent in AGENTS:
        large = agent in given.large
        shape = model_shape("Qwen3-32B" if large else "Qwen3-14B")
        context = given.prompt + given.response
        engine = engine_rates(shape, device, tensor_parallel=given.devices, context=context)
        # Gangs of a third of the training hosts, so that policies outnumber gangs.
        ranks = hosts // 3 * _PER_HOST
        trainer = trainer_rates(shape, device, ranks=ranks, context=context)
        # Twice the devices halve it, as far as it is compute.
        seconds = given.micro_batch * (2.3 if large else 1.0) / (2 if together else 1)
        policies[agent] = TwinPolicy(
            (EngineFleet(instances, engine, limit=given.limit, devices=given.devices),),
            replace(trainer, micro_batch_seconds=seconds),
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
            slots=1,
            memory=device.memory,
            device="npu",
            devices=_PER_HOST,
            host=f"h{n:02}",
        )
        for n in range(hosts // 3 * 3)
    ]
    balancing = None
    if row not in ("fixed", "serial", "colocated"):
        balancing = BalancingRules(threshold=5.0, hysteresis=1.0, cooldown_seconds=5.0)
    mode = {"serial": "serial", "colocated": "sync", "sync": "sync"}.get(row, "micro_batch")
    largest = max(one.trainer.swap_seconds for one in policies.values())
    return TwinJob(
        policies=policies,
        workload=workload,
        trainers=trainers,
        mode=mode,  # type: ignore[arg-type]
        queries_per_step=_QUERIES,
        micro_batch=_GROUP,
        in_flight=4 * _GROUP,
        balancing=balancing,
        switch_seconds=largest if together else 0.0,
        control=ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1),
    )


def table(name: str, *, quick: bool = False) -> dict[str, TwinMeans]:
    """Means of the second step of every row of a set-up; `quick`: of two rows."""
    rows = ("fixed", "flexmarl") if quick else tuple(ROWS)
    return {row: Twin(job(name, row)).run(2).means(1) for row in rows}
