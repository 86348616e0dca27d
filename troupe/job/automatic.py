"""`engine.replicas: auto` and `trainer.gang: auto` of a job, decided on given devices.

`decide` is a pure function, so that `troupe job validate`, `troupe train`, which starts a cluster
for the job, and the orchestrator come to the same numbers. Engines share the devices of a rollout
worker, and gangs share the trainers' devices, both in proportion to the policies' work
(`troupe.scheduling.filling`): tokens that their agents draw times parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from troupe.job.engines.sharing import engine_groups, followers
from troupe.job.sections.balancing import engine_count
from troupe.job.sections.policy import PolicySpec
from troupe.job.sizing import SOLD, setup_of
from troupe.job.spec import JobSpec
from troupe.scheduling.filling import fill_engines, fill_gangs
from troupe.scheduling.memory import ModelShape, rank_memory

AUTOMATIC: Final = "auto: "
"""How the sources of decided numbers begin."""


@dataclass(frozen=True, slots=True)
class JobDevices:
    """The devices that a job's engines and trainers may use."""

    engines: int
    """Devices of one rollout worker, of the one with fewest; 0: workers see no devices."""
    trainers: tuple[int, ...]
    """Devices of each trainer worker; empty: trainers compute on CPUs."""
    memory: int = 0
    """Bytes of the smallest device of the trainers; 0: unknown."""
    joins: bool = True
    """Whether a gang may span several trainer workers."""

    @property
    def each(self) -> int:
        """Devices that all trainer workers have at least: a gang takes as many of each."""
        return min(self.trainers, default=0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Numbers for what a job leaves open, and the devices that it then uses."""

    values: Mapping[str, int]
    """By field: `policies.X.engine.replicas`, `policies.X.trainer.gang`."""
    sources: Mapping[str, str]
    """By field: how the number came about, for people."""
    engines_used: int
    """Devices of a rollout worker that engines take."""
    trainers_used: int
    """Devices of all trainers on which policies train at a time."""
    notes: tuple[str, ...] = ()
    """Devices that are missing or stay idle, with a remedy; one sentence each."""


def is_open(spec: JobSpec) -> bool:
    """Return whether the job leaves a number of engines or the size of a gang open."""
    return any(
        policy.engine.replicas == "auto" or policy.trainer.gang == "auto"
        for policy in spec.policies.values()
    )


def with_values(spec: JobSpec, values: Mapping[str, int]) -> JobSpec:
    """Return the job with the decided numbers."""
    policies = dict(spec.policies)
    for field, value in values.items():
        _, name, section, leaf = field.split(".")
        policy = policies[name]
        part = getattr(policy, section).model_copy(update={leaf: value})
        policies[name] = policy.model_copy(update={section: part})
    return spec.model_copy(update={"policies": policies})


def decide(spec: JobSpec, devices: JobDevices, shapes: Mapping[str, ModelShape | None]) -> Decision:
    """Return the numbers of engines and the sizes of gangs with which the job fills `devices`.

    `shapes`: of its language models; None: unknown, so that parameters do not count.
    """
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    work = _work(spec, shapes)
    for name, count in _engines(spec, devices.engines, work).items():
        field = f"policies.{name}.engine.replicas"
        values[field] = count
        width = spec.policies[name].engine.tensor_parallel
        sources[field] = (
            f"{AUTOMATIC}{count * width} of {_devices(devices.engines)} of a rollout worker"
            if devices.engines
            else f"{AUTOMATIC}one, because rollout workers see no devices"
        )
    for name, (size, least) in _gangs(spec, devices, work, shapes).items():
        field = f"policies.{name}.trainer.gang"
        values[field] = size
        sources[field] = f"{AUTOMATIC}{size} of {_devices(sum(devices.trainers))} of trainers"
        if not devices.trainers:
            few = "one" if size == 1 else f"{size}, as few as may be"
            sources[field] = f"{AUTOMATIC}{few}, because trainers have no devices"
        elif spec.pipeline.deterministic:
            sources[field] = f"{AUTOMATIC}one, because of `pipeline.deterministic`"
        elif least > 1:
            sources[field] += f"; at least {least} by the memory model"
    for group in engine_groups(spec):
        of_group = ", shared by " + ", ".join(group.policies) if devices.engines else ""
        for field in (f"policies.{name}.engine.replicas" for name in group.policies):
            if field in sources:
                sources[field] += of_group
    decided = with_values(spec, values)
    engines = sum(devices_of_engines(decided).values())
    trainers = _trained_at_once(decided, devices)
    notes = _notes(decided, devices, engines, trainers)
    return Decision(values, sources, engines, trainers, tuple(notes))


def devices_per_trainer(spec: JobSpec, decision: Decision) -> int:
    """Return the devices of one trainer worker with which a machine's trainers run the job's gangs
    side by side, each on as few workers as can be."""
    gangs = [
        decision.values.get(f"policies.{name}.trainer.gang", spec.policies[name].trainer.ranks)
        for name in spec.trained_policies
    ]
    if not any(f"policies.{name}.trainer.gang" in decision.values for name in spec.policies):
        return max(gangs, default=1)
    return reduce(math.gcd, gangs)


def _work(spec: JobSpec, shapes: Mapping[str, ModelShape | None]) -> dict[str, float]:
    """Return the work of each policy in a step, in any unit: tokens that its agents may draw, times
    the parameters of its model if all models' parameters are known."""
    tokens: dict[str, float] = {}
    for name in spec.policies:
        agents = [one for one in spec.agents.values() if one.policy == name]
        # A policy without an agent (a teacher, a slot) works for other policies' agents.
        tokens[name] = sum(one.sampling.max_new_tokens for one in agents) or 1.0
    known = {name: shapes.get(name) for name in spec.policies}
    if any(one is None for one in known.values()):
        return tokens
    return {
        name: tokens[name] * shape.active_parameters
        for name, shape in known.items()
        if shape is not None
    }


def launched_policies(spec: JobSpec) -> dict[str, PolicySpec]:
    """Return the policies whose engines are servers that rollout workers launch."""
    return {
        name: policy
        for name, policy in spec.policies.items()
        if policy.engine.is_server
        and not policy.engine.urls
        and policy.model is not None
        and policy.simulated is None
    }


def devices_of_engines(spec: JobSpec) -> dict[str, int]:
    """Return the devices of each rollout worker that launched servers take, by policy; of policies
    that share them, under the first."""
    launched, behind = launched_policies(spec), followers(spec)
    return {
        name: engine_count(one) * one.engine.tensor_parallel
        for name, one in launched.items()
        if name not in behind
    }


def _engines(spec: JobSpec, devices: int, work: Mapping[str, float]) -> dict[str, int]:
    """Return the engines of the policies with `replicas: auto`."""
    taken, behind = devices_of_engines(spec), followers(spec)
    auto = {name: one for name, one in spec.policies.items() if one.engine.replicas == "auto"}
    fixed = sum(count for name, count in taken.items() if name not in auto)
    least = {name: spec.balancing.minimum_of(name) for name in auto}
    widths = {name: one.engine.tensor_parallel for name, one in auto.items() if name in taken}
    # Engines that policies share do the work of all of them.
    total = dict(work)
    for name, first in behind.items():
        total[first] += work[name]
        least[first] = max(least.get(first, 1), least.get(name, 1))
    found = fill_engines(widths, total, devices - fixed, least)
    # With too few devices the job is refused with the smallest numbers in the message.
    own = {name: found.get(name, max(1, least[name])) for name in auto if name not in behind}
    return {name: own[behind.get(name, name)] for name in auto}


def _gangs(
    spec: JobSpec,
    devices: JobDevices,
    work: Mapping[str, float],
    shapes: Mapping[str, ModelShape | None],
) -> dict[str, tuple[int, int]]:
    """Return the gangs of the policies with `gang: auto`: their sizes, and the least that memory
    allows."""
    auto = [name for name in spec.policies if spec.policies[name].trainer.gang == "auto"]
    each, workers = devices.each, len(devices.trainers)
    # As few as divide passes and experts: 1, unless the policy says more.
    few = {name: spec.policies[name].trainer.gang_multiple for name in auto}
    alone = {name: (number, number) for name, number in few.items()}
    if not each or spec.pipeline.deterministic:
        return alone
    auto = [name for name in auto if spec.policies[name].trainable]
    sizes = {name: _sizes(spec, name, devices, shapes.get(name)) for name in auto}
    fixed = [one for one in spec.trained_policies if one not in auto]
    taken = sum(-(-spec.policies[name].trainer.ranks // each) for name in fixed)
    least = {name: some[0] for name, some in sizes.items()}
    if sum(-(-size // each) for size in least.values()) + taken > workers:
        # More policies than workers: they take turns, each on all devices of its worker.
        room = dict.fromkeys(sizes, each)
        return alone | _largest(sizes, room)

    def seconds(name: str, size: int) -> float:
        return work[name] / size

    # In whole workers: policies that share one take turns.
    whole = {name: _in_workers(some, each) for name, some in sizes.items()}
    filled = fill_gangs(whole, seconds, (workers - taken) * each)
    return alone | _largest(sizes, filled)


def _largest(
    sizes: Mapping[str, Sequence[int]], room: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return the largest size of each gang that has room, or the smallest one, which is the second
    number."""
    return {
        name: (max(n for n in some if n <= max(room[name], some[0])), some[0])
        for name, some in sizes.items()
    }


def _in_workers(sizes: Sequence[int], each: int) -> list[int]:
    """Return the devices of the workers that gangs of these sizes occupy, ascending."""
    return sorted({-(-size // each) * each for size in sizes})


def _sizes(spec: JobSpec, name: str, devices: JobDevices, shape: ModelShape | None) -> list[int]:
    """Return the sizes that a policy's gang may have, ascending: as many devices of each of one or
    more workers, which hold the policy; and no more than find a sample in every micro-batch."""
    each, workers = devices.each, len(devices.trainers)
    trainer, pipeline = spec.policies[name].trainer, spec.pipeline
    most = pipeline.micro_batch_samples * trainer.context_parallel
    several = range(2, workers + 1) if devices.joins else ()
    possible = [*range(1, each + 1), *(n * each for n in several)]
    usable = [n for n in possible if n <= most and n % trainer.gang_multiple == 0]
    usable = usable or [trainer.gang_multiple]
    if shape is None or not devices.memory:
        return usable

    def needed(ranks: int) -> int:
        setup = setup_of(spec, name, shape, device="cuda", memory=devices.memory, ranks=ranks)
        return rank_memory(shape, setup).total

    fitting = [n for n in usable if needed(n) <= SOLD * devices.memory]
    # Where none fits, the trainer's refusal says what the largest lacks.
    return fitting or usable[-1:]


def _trained_at_once(spec: JobSpec, devices: JobDevices) -> int:
    """Return the devices on which policies train at the same time."""
    each, left, used = devices.each, len(devices.trainers), 0
    if not each:
        return 0
    for size in sorted(spec.policies[name].trainer.ranks for name in spec.trained_policies)[::-1]:
        workers = -(-size // each)
        if workers <= left:
            left -= workers
            used += size
    return used


def _notes(spec: JobSpec, devices: JobDevices, engines: int, trainers: int) -> Iterable[str]:
    """Yield sentences about devices that a job which launches servers lacks or leaves idle."""
    launched = launched_policies(spec)
    if 0 < devices.engines < engines:
        yield (
            f"its engines need {_devices(engines)}, and a rollout worker has {devices.engines}; "
            "give engines more (--engine-devices), or let them take turns with trainers "
            "(pipeline.colocate)"
        )
    if launched and devices.engines > engines:
        behind = followers(spec)
        own = {name: one for name, one in launched.items() if name not in behind}
        numbers = ", ".join(f"{name} {engine_count(one)}" for name, one in own.items())
        yield (
            f"{devices.engines - engines} of {_devices(devices.engines)} of a rollout worker stay "
            f"idle (engines: {numbers}); set policies.*.engine.replicas to `auto`, or give more "
            "devices to trainers (--trainer-devices)"
        )
    trained = [name for name in spec.trained_policies if spec.policies[name].model is not None]
    if trained and launched and sum(devices.trainers) > trainers:
        numbers = ", ".join(f"{name} {spec.policies[name].trainer.ranks}" for name in trained)
        yield (
            f"{sum(devices.trainers) - trainers} of {_devices(sum(devices.trainers))} of trainers "
            f"stay idle (gangs: {numbers}); set policies.*.trainer.gang to `auto`, or give more "
            "devices to engines (--engine-devices)"
        )


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"
