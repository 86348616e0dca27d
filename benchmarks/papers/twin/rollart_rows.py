"""RollArt's step times (arXiv 2512.22560v2, OSDI 2026) on its published devices and tasks.

Published: batch, groups, five kinds of tasks in equal parts, the longest context, devices of every
row, tensor parallelism, the class for each kind, alpha 1. Lengths and waits are unpublished:
`Assumed` has them, found by a search over the twin for the rows' ratios (docs/benchmarks/twin.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.papers.twin.rollart import (
    CONTEXT,
    FEATURES,
    MODEL,
    Features,
    engine_fleet,
    run,
    training_hosts,
)
from testbed.twin.cluster import PublishedJob
from testbed.twin.workload import MixedWorkload
from troupe.twin.cluster import TwinMeans
from troupe.twin.costs import DEVICES, model_shape, trainer_rates
from troupe.twin.job import ControlPlane, TwinPolicy
from troupe.twin.workload import Lengths, TeamWorkload

PUBLISHED: Final = {"sync": 2.05, "one_off": 1.35, "areal": 1.31}
ROWS: Final = {
    "sync": "Sync+: rollout, then training",
    "one_off": "One-off: batch k trains while batch k + 1 rolls out",
    "areal": "AReaL-like: steps overlap, alpha 1",
    "rollart": "RollArt: also affinity, and weights fetched during serving",
}
_QUERIES: Final = 64
_GROUP: Final = 8
_MOST_CONTEXT: Final = 32_768
# Engines of four devices: 96 H800 for the baselines, 64 H800 and 32 H20 for RollArt; 32 H800 train.
BASELINE: Final = {"H800": 24}
MIXED: Final = {"H800": 16, "H20": 8}
_TRAINING_HOSTS: Final = 4
# Affinity is published over fleets of about one price: 64 H800 and 24 H20, 72 H800, 208 H20.
_AFFINITY: Final = {"H800": 16, "H20": 6}
_ONE_CLASS: Final = {"H800": 18, "H20": 52}
# By kind: maximum turns (published: up to 30 to 100, and up to five), and whether it draws long
# thoughts on H20 or short replies on H800 (published).
_KINDS: Final = {
    "software": (100, False),
    "shop": (50, False),
    "lake": (30, False),
    "mathematics": (5, True),
    "game": (5, True),
}


@dataclass(frozen=True)
class Assumed:
    """Unpublished values."""

    turns: float = 20.0
    """Mean turns of tasks with short replies."""
    few_turns: float = 3.0
    """Mean turns of tasks with long replies."""
    turns_sigma: float = 0.15
    observation: float = 100.0
    """New tokens of a prompt."""
    action: float = 60.0
    """Tokens of a short reply."""
    thought: float = 1800.0
    """Tokens of a long reply."""
    reply_sigma: float = 0.25
    wait: float = 2.0
    """Seconds of an environment's step in tasks with short replies; in others a tenth."""
    reset: float = 27.0
    """Seconds that an environment needs to start."""
    reset_sigma: float = 0.4


ASSUMED: Final = Assumed()


def tasks(given: Assumed = ASSUMED) -> MixedWorkload:
    """Return queries of the five kinds in equal parts."""
    parts = []
    for kind, (most, long) in _KINDS.items():
        wait = given.wait / 10 if long else given.wait
        workload = TeamWorkload(
            agents=("agent",),
            rounds=Lengths(given.few_turns if long else given.turns, given.turns_sigma, most),
            prompt=Lengths(given.observation, 0.5),
            response=Lengths(given.thought if long else given.action, given.reply_sigma),
            wait=Lengths(wait, 0.8, 20 * wait),
            group_size=_GROUP,
            reset=Lengths(given.reset, given.reset_sigma, 12 * given.reset),
            most_context=_MOST_CONTEXT,
            domain=kind,
        )
        parts.append((workload, 1.0))
    return MixedWorkload(parts)


def job(
    features: Features, fleet: Mapping[str, int] | None = None, given: Assumed = ASSUMED
) -> PublishedJob:
    """Return the job of a row. `fleet`: engines of each class; None: the row's."""
    if fleet is None:
        fleet = MIXED if features.affinity else BASELINE
    ranks = 8 * _TRAINING_HOSTS
    trainer = trainer_rates(model_shape(MODEL), DEVICES["H800"], ranks=ranks, context=CONTEXT)
    by_domain = [(kind, "H20" if long else "H800") for kind, (_, long) in _KINDS.items()]
    return PublishedJob(
        policies={
            "agent": TwinPolicy(
                tuple(engine_fleet(device, count, features) for device, count in fleet.items()),
                trainer,
                ranks=ranks,
            )
        },
        workload=tasks(given),
        trainers=training_hosts(_TRAINING_HOSTS),
        mode=features.mode,  # type: ignore[arg-type]
        alpha=features.alpha,
        queries_per_step=_QUERIES,
        micro_batch=_QUERIES,
        in_flight=_QUERIES * _GROUP,
        whole_batches=features.whole_batches,
        classes_by_domain=tuple(by_domain) if features.affinity else (),
        share_prefixes=True,
        control=ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1),
    )


def rows(steps: int = 4) -> dict[str, TwinMeans]:
    """Return the table of step times."""
    return {row: run(job(features), steps) for row, features in FEATURES.items()}


def affinity(steps: int = 4) -> dict[str, float]:
    """Return seconds per step of both classes with the map of kinds, and of one class of about the
    same price, with RollArt's other mechanisms."""
    full = FEATURES["rollart"]
    unknown = replace(full, affinity=False)
    jobs = {"both": job(full, _AFFINITY), "both, no affinity": job(unknown, _AFFINITY)}
    for device, count in _ONE_CLASS.items():
        jobs[f"{device} only"] = job(unknown, {device: count})
    return {name: run(one, steps).seconds for name, one in jobs.items()}


def bound(alpha: int, steps: int = 4) -> float:
    """Return seconds per step of the last row with another bound of staleness."""
    return run(job(replace(FEATURES["rollart"], alpha=alpha)), steps).seconds
