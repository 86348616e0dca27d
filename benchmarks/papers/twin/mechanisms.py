"""The gain of each mechanism, alone and together, in the twin, on clusters of several sizes.

The job is the one of rollart.py, with environments that stall and break; 64, 512 or 3,000 devices
generate and train one policy of 32B. *Alone* adds one mechanism to a job without any, *without*
removes one from a job with all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from benchmarks.papers.twin import rollart
from testbed.twin.cluster import PublishedJob, PublishedTwin

MECHANISMS: Final = {
    "micro_batch": "gradients while the step rolls out (`mode`)",
    "asynchronous": "the next steps roll out meanwhile, alpha 1 (`mode`)",
    "affinity": "classes of devices are known (`routing`)",
    "redundancy": "8 of 10 trajectories of a query (`redundant_trajectories`)",
    "fetched": "weights are fetched during serving",
    "cache": "engines cache the shared prefixes of a conversation's turns",
    "prefixes": "trainers compute the shared prefixes of a conversation's turns once",
}
# H800 and H20 engines of four devices, and training hosts of eight H800, by total devices.
SIZES: Final = {64: (3, 7, 3), 512: (26, 52, 25), 3000: (150, 300, 150)}


@dataclass(frozen=True)
class Worth:
    """Seconds per step of one size: with no mechanism, all, only one, and all but one."""

    none: float
    all: float
    alone: dict[str, float]
    without: dict[str, float]


def job(devices: int, used: frozenset[str], *, queries_per_device: float = 0.5) -> PublishedJob:
    """Return the job on one of `SIZES` with some of the mechanisms.

    Raises ValueError for another size or an unknown mechanism.
    """
    if devices not in SIZES:
        raise ValueError(f"devices = {devices}: one of {', '.join(map(str, SIZES))}")
    if unknown := used - MECHANISMS.keys():
        raise ValueError(f"used: there is no mechanism {', '.join(sorted(unknown))}")
    h800, h20, hosts = SIZES[devices]
    mode = "micro_batch" if "micro_batch" in used else "sync"
    features = rollart.Features(
        mode="async" if "asynchronous" in used else mode,
        alpha=1 if "asynchronous" in used else 0,
        affinity="affinity" in used,
        redundant=2 if "redundancy" in used else 0,
        fetched="fetched" in used,
    )
    one = rollart.job(features, fleet={"H800": h800, "H20": h20}, disturbed=True)
    queries = max(4, round(devices * queries_per_device))
    trainer = one.policies["agent"].trainer
    # The state of the gang of 24 devices in `rollart`, on this cluster's devices.
    speed = trainer.backward_tokens_per_second * 8 * hosts / one.policies["agent"].ranks
    policy = replace(
        one.policies["agent"],
        trainer=replace(trainer, backward_tokens_per_second=speed),
        ranks=8 * hosts,
    )
    return replace(
        one,
        policies={"agent": policy},
        trainers=rollart.training_hosts(hosts),
        queries_per_step=queries,
        micro_batch=queries,
        in_flight=2 * queries * (8 + features.redundant),
        share_prefixes="prefixes" in used,
        prefix_cache="cache" in used,
    )


def worth(
    devices: int, *, overlapping: int = 2, apart: int = 1, queries_per_device: float = 0.5
) -> Worth:
    """Measure all rows of one size: means of `overlapping` steps of jobs with overlapping steps,
    and of `apart` steps of other jobs.

    The former begin two steps at once, so that the second one ends early, and short and long steps
    alternate from then on: the first two are left out, and `overlapping` should be even.
    """

    def seconds(used: frozenset[str]) -> float:
        one = job(devices, used, queries_per_device=queries_per_device)
        if one.mode == "async":
            return PublishedTwin(one).run(2 + overlapping + one.alpha).means(2, one.alpha).seconds
        return rollart.run(one, apart).seconds

    every = frozenset(MECHANISMS)
    return Worth(
        seconds(frozenset()),
        seconds(every),
        {name: seconds(frozenset({name})) for name in MECHANISMS},
        {name: seconds(every - {name}) for name in MECHANISMS},
    )
