"""A job and its cluster in the form that the twin runs.

It has the engines and trainers of each policy, the workload, the pipeline mode and its bounds, and
the job's mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from troupe.scheduling.balancing import BalancingRules, Pair
from troupe.scheduling.binding import RankWorker
from troupe.scheduling.routing import Policy as RoutingPolicy
from troupe.twin.costs import EngineRates, TrainerRates
from troupe.twin.workload import Workload

Mode: TypeAlias = Literal["serial", "sync", "micro_batch", "async"]


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """The part of a job's `routing` section that decides among equal engines."""

    policy: RoutingPolicy = "least_work"
    sticky: bool = True
    priority: bool = True
    adaptive_limit: bool = True


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """Equal engines of one policy, on each rollout worker."""

    count: int
    rates: EngineRates
    limit: int = 64
    """Turns that one engine runs at once."""
    devices: int = 1
    """Devices of one engine (tensor parallel)."""
    adapters: bool = False
    """Whether new weights are adapters, which are loaded next to those in use: turns go on."""


@dataclass(frozen=True, slots=True)
class TwinPolicy:
    """A policy with its engines and the gang that trains it."""

    engines: tuple[EngineFleet, ...]
    trainer: TrainerRates
    ranks: int = 1
    state_bytes: int = 0
    """Bytes of its training state on each device of its gang."""
    trained: bool = True
    alpha: int | None = None
    """Staleness bound of this policy in mode `async`; None: the job's."""
    minimum: int = 1
    """Number of engines that it keeps on each rollout worker (`balancing.minimum`)."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Seconds that the services themselves add; see `docs/benchmarks/twin.md` for their origin."""

    turn: float = 0.0
    """Per turn: workflow, tokenizer, messages between services."""
    trajectory: float = 0.0
    """From the end of one trajectory to the start of the next one in its place: rows, events."""
    claim: float = 0.0
    """Per micro-batch: claiming and fetching its rows."""
    commit: float = 0.0
    """From an optimizer step to the announcement of its version to engines."""
    step: float = 0.0
    """From the last commit of a step to the first turn of the next one."""


@dataclass(frozen=True)
class TwinJob:
    """A job and its cluster, as the twin runs them."""

    policies: Mapping[str, TwinPolicy]
    workload: Workload
    trainers: Sequence[RankWorker]
    mode: Mode = "micro_batch"
    alpha: int = 1
    queries_per_step: int = 64
    micro_batch: int = 16
    in_flight: int = 1024
    spare: int = 0
    """Queries that run in addition to the step's (`pipeline.over_sampling`)."""
    redundant: int = 0
    """Number of surplus trajectories of each query: its group is complete without them
    (`pipeline.redundant_trajectories`)."""
    rollout_workers: int = 1
    """Processes that run trajectories, each with the engines of `policies` in front of it."""
    routing: RoutingRules = field(default_factory=RoutingRules)
    balancing: BalancingRules | None = None
    """None: engines stay with their policies."""
    groups: Sequence[tuple[str, ...]] = ()
    """Policies that share the engines of the first of each group, in the order of `policies`."""
    barred: Collection[Pair] = ()
    """(source, target) pairs of policies between which no engine moves, in addition to pairs whose
    engines differ in speed."""
    switch_seconds: float = 0.0
    """In mode `colocated`: seconds of each switch between rollout and training."""
    share_prefixes: bool = False
    """Whether the trainer computes the shared tokens of a conversation's turns only once."""
    prefix_cache: bool = True
    control: ControlPlane = ControlPlane()
    spans: bool = False
    """Whether every busy span is kept, for pictures."""


def check(job: TwinJob) -> None:
    """Raise ValueError naming the invalid field."""
    if not job.policies:
        raise ValueError("policies: a job needs at least one")
    for name, policy in job.policies.items():
        if not sum(fleet.count for fleet in policy.engines):
            raise ValueError(
                f"policies.{name}.engines: a policy needs an engine per rollout worker"
            )
        for fleet in policy.engines:
            if not 0 < fleet.rates.prefill_tokens_per_second < math.inf:
                raise ValueError(
                    f"policies.{name}.prefill_tokens_per_second = "
                    f"{fleet.rates.prefill_tokens_per_second}: must be above 0"
                )
            if fleet.rates.decode_seconds <= 0 and fleet.rates.decode_seconds_per_turn <= 0:
                raise ValueError(f"policies.{name}.decode_seconds: must be above 0")
        if policy.trained and not 0 < policy.trainer.backward_tokens_per_second < math.inf:
            raise ValueError(
                f"policies.{name}.backward_tokens_per_second = "
                f"{policy.trainer.backward_tokens_per_second}: must be above 0"
            )
    shared = [name for group in job.groups for name in group]
    if len(set(shared)) < len(shared):
        raise ValueError("groups: a policy is in one group at most")
    for group in job.groups:
        fleets = [job.policies[name].engines for name in group if name in job.policies]
        if len(fleets) < len(group) or any(one != fleets[0] for one in fleets):
            raise ValueError(f"groups: {', '.join(group)} are not policies with equal engines")
    if any(policy.trained for policy in job.policies.values()) and not job.trainers:
        raise ValueError("trainers: a job that trains needs at least one")
    for field_name in ("queries_per_step", "micro_batch", "in_flight", "rollout_workers"):
        if getattr(job, field_name) < 1:
            raise ValueError(f"{field_name} = {getattr(job, field_name)}: must be at least 1")
    for field_name in ("alpha", "spare", "redundant"):
        if getattr(job, field_name) < 0:
            raise ValueError(f"{field_name} = {getattr(job, field_name)}: must be at least 0")
    for name, policy in job.policies.items():
        if policy.alpha is not None and policy.alpha < 0:
            raise ValueError(f"policies.{name}.alpha = {policy.alpha}: must be at least 0")
    if job.redundant >= (size := len(job.workload(0))):
        raise ValueError(f"redundant = {job.redundant}: a query has only {size} trajectories")
