"""Agentic tasks of several kinds on two classes of device, as in RollArt (arXiv 2512.22560): gains
and costs of affinity, environments, redundancy and failing hosts in the twin.
`benchmarks.papers.twin.rollart_rows` has the table of step times.

Published: H800 and H20, models up to 32B, longest responses of 5 to 9 times the mean, environments
of 10 s, alpha 1, 29.7 s for a pull of 32B. All other values are assumed, as noted at each constant.
docs/benchmarks/twin.md lists the values that were changed after results were known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from testbed.twin.cluster import ClassedFleet, PublishedJob, PublishedTwin
from testbed.twin.faults import NodeFaults
from testbed.twin.workload import DisturbedTeam, MixedWorkload
from troupe.scheduling.binding import RankWorker
from troupe.scheduling.routing import Rates
from troupe.twin.cluster import TwinMeans
from troupe.twin.costs import DEVICES, EngineRates, engine_rates, model_shape, trainer_rates
from troupe.twin.job import ControlPlane, EngineFleet, TwinPolicy
from troupe.twin.workload import Lengths, TwinTrajectory, TwinTurn

# Seconds of a pull of 32B, and the exposed part.
PULL: Final = (29.7, 9.6)

MODEL: Final = "Qwen3-32B"
# Devices (assumed): engines of four on 24 H800 and 48 H20; 24 more H800 train.
_TENSOR: Final = 4
_GENERATING: Final = {"H800": 6, "H20": 12}
_TRAINING_HOSTS: Final = 3
# Price of an H800 over an H20 (assumed: about the clouds' prices).
_PRICE: Final = 2.85
_QUERIES: Final = 64
_GROUP: Final = 8
CONTEXT: Final = 8000.0
_LIMIT: Final = 64
# By kind of task, prefill-heavy ones with short replies, and one with only decoding (assumed):
# turns, new tokens of a prompt, tokens of a reply, seconds of an environment's step.
_SHORT: Final = {
    "software": (25.0, 1200.0, 150.0, 5.0),
    "web": (12.0, 2500.0, 80.0, 4.0),
    "game": (30.0, 200.0, 60.0, 0.5),
}
_LONG: Final = {"mathematics": (1.0, 300.0, 3000.0, 0.5)}
# Share of trajectories with a longer environment step, its additional seconds, and the share with a
# broken environment (assumed: as in benchmarks.papers.trajectories).
_STALLS, _STALL_SECONDS, _FAULTS = 0.04, 100.0, 0.03


def tasks(share: float = 0.5, group: int = _GROUP, *, disturbed: bool = False) -> MixedWorkload:
    """Return queries of every kind, a fraction `share` of them with only decoding. `disturbed`:
    environments stall and break."""
    parts = []
    for kinds, part in ((_SHORT, 1 - share), (_LONG, share)):
        for kind, (turns, prompt, response, wait) in kinds.items():
            workload = DisturbedTeam(
                agents=("agent",),
                rounds=Lengths(turns, 0.5 if turns > 1 else 0.0, 2 * turns),
                prompt=Lengths(prompt, 0.5),
                # A sigma of 0.7: the longest of a batch is 5 to 9 times the mean.
                response=Lengths(response, 0.7, 28_000),
                wait=Lengths(wait, 0.8, 20 * wait),
                group_size=group,
                reset=Lengths(5.0, 1.0, 60.0),
                stalls=_STALLS if disturbed and turns > 1 else 0.0,
                stall_seconds=_STALL_SECONDS,
                faults=_FAULTS if disturbed and turns > 1 else 0.0,
                domain=kind,
            )
            parts.append((workload, part / len(kinds)))
    return MixedWorkload(parts)


def _rates(device: str, *, fetched: bool) -> EngineRates:
    """Return the rates of an engine, whose weights take the published pull, fetched during serving
    or not.

    The exposed part of a fetched pull is the copy from host memory to the devices.
    """
    shape, costs = model_shape(MODEL), DEVICES[device]
    rates = engine_rates(shape, costs, tensor_parallel=_TENSOR, context=CONTEXT)
    copy = 2 * shape.parameters / (_TENSOR * costs.host_link * 0.5)
    if fetched:
        return replace(rates, load_seconds=copy, fetch_seconds=PULL[0])
    return replace(rates, load_seconds=PULL[0] + copy)


def _known(rates: EngineRates) -> Rates:
    step = rates.decode_seconds + rates.decode_seconds_per_turn * _LIMIT
    return Rates(rates.prefill_tokens_per_second, _LIMIT / step)


@dataclass(frozen=True)
class Features:
    """The mechanisms of RollArt that a job has."""

    mode: str = "async"
    alpha: int = 1
    whole_batches: bool = False
    affinity: bool = True
    redundant: int = 0
    fetched: bool = True


def training_hosts(count: int) -> list[RankWorker]:
    """Return trainer workers on hosts of eight GPUs."""
    return [RankWorker(f"t{n:03}", devices=8, device="cuda", host=f"h{n:03}") for n in range(count)]


def engine_fleet(device: str, count: int, features: Features) -> ClassedFleet:
    """Return engines of the model on one class of device."""
    rates = _rates(device, fetched=features.fetched)
    if not features.affinity:
        return ClassedFleet(count, rates, _LIMIT, _TENSOR)
    return ClassedFleet(
        count, rates, _LIMIT, _TENSOR, device_class=device, known_rates=_known(rates)
    )


# Rows of the table of step times. Between whole batches all engines load at once.
FEATURES: Final = {
    "sync": Features("sync", 0, whole_batches=True, affinity=False, fetched=False),
    "one_off": Features(whole_batches=True, affinity=False),
    "areal": Features(affinity=False, fetched=False),
    "rollart": Features(),
}


def job(
    features: Features,
    *,
    share: float = 0.5,
    fleet: dict[str, int] | None = None,
    disturbed: bool = False,
) -> PublishedJob:
    """Return a job with these mechanisms. `share`: fraction of queries with only decoding; `fleet`:
    engines of each class; `disturbed`: environments stall and break."""
    fleets = [
        engine_fleet(device, count, features) for device, count in (fleet or _GENERATING).items()
    ]
    ranks = 8 * _TRAINING_HOSTS
    trainer = trainer_rates(model_shape(MODEL), DEVICES["H800"], ranks=ranks, context=CONTEXT)
    by_domain = [(kind, "H800") for kind in _SHORT] + [(kind, "H20") for kind in _LONG]
    return PublishedJob(
        policies={"agent": TwinPolicy(tuple(fleets), trainer, ranks=ranks)},
        workload=tasks(share, _GROUP + features.redundant, disturbed=disturbed),
        trainers=training_hosts(_TRAINING_HOSTS),
        mode=features.mode,  # type: ignore[arg-type]
        alpha=features.alpha,
        queries_per_step=_QUERIES,
        micro_batch=64,
        in_flight=2 * _QUERIES * (_GROUP + features.redundant),
        redundant=features.redundant,
        whole_batches=features.whole_batches,
        classes_by_domain=tuple(by_domain) if features.affinity else (),
        share_prefixes=True,
        control=ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1),
    )


def run(one: PublishedJob, steps: int = 4) -> TwinMeans:
    """Return means without the first step (the first two, which begin at once, if steps overlap),
    and without the last ones, during which no steps begin."""
    first, after = (2, 1 + one.alpha) if one.mode == "async" else (1, 0)
    return PublishedTwin(one).run(first + steps + after).means(first, after)


def one_class(steps: int = 4) -> dict[str, float]:
    """Return seconds per step with all mechanisms, without affinity, and on engines of one class at
    the same price."""
    full = FEATURES["rollart"]
    h800, h20 = _GENERATING["H800"], _GENERATING["H20"]
    jobs = {
        "both": job(full),
        "both, no affinity": job(replace(full, affinity=False)),
        "H800 only": job(full, fleet={"H800": round(h800 + h20 / _PRICE)}),
        "H20 only": job(full, fleet={"H20": round(h20 + h800 * _PRICE)}),
    }
    return {name: run(one, steps).seconds for name, one in jobs.items()}


def environments(sigma: float, *, queries: int = 16) -> float:
    """Return the step time of environments that advance as a batch over the one of independent
    trajectories: six turns, Gaussian steps of 10 s on average with this sigma, as in
    benchmarks.papers.trajectories."""
    shape, device = model_shape("Qwen3-8B"), DEVICES["H800"]
    engine = engine_rates(shape, device, context=1000.0)
    trainer = trainer_rates(shape, device, ranks=8, context=1000.0)

    def workload(index: int) -> Sequence[TwinTrajectory]:
        rng = random.Random(f"{sigma}/{index}")
        reply = Lengths(100.0, 0.6, 900)
        return [
            TwinTrajectory(
                tuple(
                    TwinTurn(
                        "agent", 200, round(reply.draw(rng)) + 1, max(0.0, rng.gauss(10, sigma))
                    )
                    for _ in range(6)
                )
            )
            for _ in range(_GROUP)
        ]

    whole = PublishedJob(
        policies={"agent": TwinPolicy((EngineFleet(4, engine),), trainer, ranks=8)},
        workload=workload,
        trainers=[RankWorker("t", devices=8, device="cuda", host="h")],
        mode="async",
        queries_per_step=queries,
        micro_batch=queries,
        in_flight=queries * _GROUP,
        barrier=True,
    )
    return run(whole, 6).seconds / run(replace(whole, barrier=False), 6).seconds


def redundancy(steps: int = 3) -> dict[int, float]:
    """Return seconds per step by redundant trajectories of a group, with environments that stall
    and break."""
    features = replace(FEATURES["rollart"], mode="micro_batch", alpha=0)
    return {
        count: run(job(replace(features, redundant=count), disturbed=True), steps).seconds
        for count in (0, 2)
    }


# Unexpected interruptions of Llama 3's pre-training: 419 in 54 days on 16,384 GPUs of 2,048 hosts
# (arXiv 2407.21783, section 3.3.4).
HOST_MTBF: Final = 54 * 86_400 * 2048 / 419


@dataclass(frozen=True)
class Goodput:
    """The cost of failing hosts: measured at a multiple of the published rate, per day at the
    published rate."""

    failures: int
    lost_seconds: float
    """Seconds per failure, compared with the same steps without failures."""
    per_day: float
    """Failures per day at the published rate."""

    @property
    def share(self) -> float:
        """The remaining fraction of a day's work."""
        return 1 - self.per_day * self.lost_seconds / 86_400


def goodput(
    large: PublishedJob, hosts: int, steps: int, *, faster: float = 100.0, spare: int = 0
) -> Goodput:
    """Return the cost of failures of a job on `hosts` hosts, by comparing a job that fails `faster`
    times as often as published with one that does not fail. A lost host is away for 300 s; a gang
    needs 120 s more. `spare`: hosts in addition to the gang's. `faster` must leave most steps
    without a failure, otherwise the cost per failure is wrong."""
    more = [RankWorker(f"spare{n}", devices=8, device="cuda", host=f"s{n}") for n in range(spare)]
    large = replace(large, trainers=[*large.trainers, *more])
    faults = NodeFaults(HOST_MTBF / faster, 300.0, 120.0)
    failing = PublishedTwin(replace(large, faults=faults))
    good, bad = PublishedTwin(large).run(steps), failing.run(steps)
    lost = bad.steps[-1].at - good.steps[-1].at
    per_day = 86_400 * hosts / HOST_MTBF
    return Goodput(failing.failures, lost / max(1, failing.failures), per_day)
