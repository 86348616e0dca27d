"""Search for the best split of a cluster's devices for a job, with trials in the twin.

A split defines how many hosts (or, on one host, devices) train, over how many devices each policy's
gang is sharded, how many devices one engine takes, and how many engines each policy has. Splits
that do not fit into memory, or that `troupe.scheduling.devices.plan` cannot place, are left out;
the others are ordered by a bound, and the best are run in the twin, on the same trajectories.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from troupe.devices import Device
from troupe.job import JobSpec
from troupe.job.engines.sharing import engine_groups, shared_policies
from troupe.job.sizing import SOLD, read_shape
from troupe.rpc import InvalidArgument
from troupe.scheduling.balancing import BalancingRules, Pair
from troupe.scheduling.binding import RankWorker
from troupe.scheduling.devices import DeviceHost, DeviceRequest
from troupe.scheduling.devices import plan as place
from troupe.scheduling.filling import fill_engines, fill_gangs
from troupe.scheduling.memory import ModelShape
from troupe.twin.cluster import Twin, TwinMeans, TwinRun
from troupe.twin.costs import DeviceCosts
from troupe.twin.job import ControlPlane, EngineFleet, RoutingRules, TwinJob, TwinPolicy
from troupe.twin.job_rates import JobRates
from troupe.twin.profile import JobProfile
from troupe.twin.trainers import single_rank_workers
from troupe.twin.workload import Lengths, TeamWorkload, TwinTrajectory, TwinTurn, Workload

Bottleneck = Literal["engines", "trainers", "longest trajectories", "hand-over"]

# Maximum number of policies for which shares of engines not proportional to work are considered.
_SHARED_ANEW: Final = 3
# Number of splits with the best bounds that are run in the twin.
_TRIED: Final = 8
# Steps of a trial: the first one is not counted. In mode `async` nothing follows the last one.
_STEPS: Final = 3
# The services' overhead in seconds on machines of a GPU cluster: per turn, trajectory, commit,
# step.
_CONTROL: Final = ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1)
# A step whose parts are within this of each other is bound by its longest trajectories.
_SLACK: Final = 0.1


@dataclass(frozen=True, slots=True)
class Habits:
    """Assumptions about a job's trajectories before its first run."""

    turns: float = 4.0
    """Rounds of a trajectory, in each of which every agent speaks."""
    prompt_tokens: float = 500.0
    """New tokens that a turn reads."""
    response_tokens: float = 0.0
    """Tokens that a turn draws; 0: a third of its agent's `max_new_tokens`."""
    response_sigma: float = 0.7
    wait_seconds: float = 1.0
    """Seconds of tools or the environment after a turn."""
    wait_sigma: float = 1.0

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _HABITS.items():
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise InvalidArgument(
                    f"{name} = {value:g} is not a number from {lowest:g} to {highest:,}",
                    field=name,
                    value=value,
                    remedy="Give the mean of a trajectory of the job.",
                )


# The least and the greatest of each mean. A trial keeps every turn in memory and plays it, so that
# larger numbers would fill the memory before it ends.
_HABITS: Final = {
    "turns": (1.0, 1_000),
    "prompt_tokens": (1.0, 10_000_000),
    "response_tokens": (0.0, 10_000_000),
    "wait_seconds": (0.0, 86_400),
}


@dataclass(frozen=True, slots=True)
class PolicySplit:
    """The devices of one policy."""

    engines: int
    """Per host that runs engines (on one host: in total): `engine.replicas`."""
    tensor_parallel: int
    gang: int
    """`trainer.gang`; 0: not trained."""
    engine_turns: int
    """Turns that one engine runs at once."""
    trainer_bytes: int
    """Bytes on each device of its gang."""
    shares: str = ""
    """The policy whose engines these are; empty: its own, which others may share."""


@dataclass(frozen=True, slots=True)
class ClusterSplit:
    """The division of a cluster: of its devices if it has one host, otherwise of its hosts."""

    policies: Mapping[str, PolicySplit]
    engine_hosts: int
    training_hosts: int
    engine_devices: int
    """Devices of engines on each host that has any."""
    training_devices: int
    """Devices of trainers on each host that has any."""

    @property
    def devices(self) -> tuple[int, int]:
        """Total devices of engines and of trainers."""
        return (
            self.engine_hosts * self.engine_devices,
            self.training_hosts * self.training_devices,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """A split and its measurements in the twin."""

    split: ClusterSplit
    means: TwinMeans
    bottleneck: Bottleneck


@dataclass(frozen=True)
class JobPlan:
    """The best split of a job on a cluster, other splits, and the benefit of one more host."""

    best: Prediction
    others: Sequence[Prediction] = ()
    considered: int = 0
    more_seconds: float | None = None
    """Seconds per step with one more host; None: not requested, or nothing fits."""
    shared: Sequence[str] = ()
    """Savings of policies that share engines, for people."""
    measured: Sequence[str] = ()
    assumed: Sequence[str] = ()
    """The basis of the times, for people."""
    run: TwinRun | None = None
    """The best split's trial with every busy time, if a picture was requested. The prediction is
    the mean of its steps without the first."""


@dataclass(frozen=True)
class _Case:
    """A job on a cluster, with values that depend on neither split nor trial."""

    spec: JobSpec
    device: DeviceCosts
    hosts: int
    per_host: int
    workload: Workload
    rates: JobRates
    context: Mapping[str, float]
    decoded: Mapping[str, float]
    """Response tokens of a step by policy, from a sample of its queries."""
    read: Mapping[str, float]
    rows: Mapping[str, float]
    """Tokens of a step's rows by policy."""
    longest: float = 0.0
    """Response tokens of the longest trajectory of the sample."""

    @property
    def names(self) -> Sequence[str]:
        """The job's policies."""
        return tuple(self.spec.policies)

    @property
    def fleets(self) -> Mapping[str, tuple[str, ...]]:
        """The policies on the same engines, under the first of them."""
        every = self.rates.members
        return {name: every[name] for name in self.names if every[name][0] == name}

    @property
    def colocated(self) -> bool:
        """Whether the engines and trainers of all policies take turns on the same devices."""
        return len(self.spec.colocated) == len(self.spec.policies)

    @property
    def simulated(self) -> bool:
        """Whether all policies of the job are simulated."""
        return all(self.rates.simulated(name) is not None for name in self.names)


def plan_job(
    spec: JobSpec,
    devices: Sequence[Device],
    costs: DeviceCosts,
    *,
    hosts: int = 1,
    habits: Habits | None = None,
    profile: JobProfile | None = None,
    more: bool = True,
    picture: bool = False,
) -> JobPlan:
    """Return the best split of `devices`, which are spread evenly over `hosts`, for a job.

    `habits`: assumptions about trajectories; `profile`: measurements of a run of the job, which
    replace them. `more`: also try one more host. Raises InvalidArgument: devices of several
    classes, hosts that do not divide them, a job with networks, models whose shape is not known
    here, a profile of another job, a cluster that is too small (the error says what is missing).
    """
    classes = {one.device_class for one in devices}
    if len(classes) != 1:
        raise InvalidArgument(
            f"devices of {len(classes)} classes cannot be planned together",
            field="devices",
            value="+".join(sorted(classes)),
            remedy="Plan for one class at a time.",
        )
    if hosts < 1 or len(devices) % hosts:
        raise InvalidArgument(
            f"{len(devices)} devices cannot be spread evenly over {hosts} hosts",
            field="hosts",
            value=hosts,
            remedy="Give a number of hosts that divides the number of devices.",
        )
    if profile is not None:
        profile.check(spec)
    case = _case(spec, costs, hosts, len(devices) // hosts, habits or Habits(), profile)
    splits = list(_splits(case, devices))
    if not splits:
        raise _too_small(case)
    splits.sort(key=lambda one: _bound(case, one))
    tried = sorted(
        (_predict(case, one) for one in splits[:_TRIED]), key=lambda one: one.means.seconds
    )
    more_seconds = None
    if more:
        wider = replace(case, hosts=hosts + 1)
        added = _devices(devices, wider)
        options = sorted(_splits(wider, added), key=lambda one: _bound(wider, one))
        if options:
            more_seconds = min(_predict(wider, one).means.seconds for one in options[:_TRIED])
    measured, assumed = case.rates.origins()
    assumed += _unmodelled(spec)
    shared = _savings(case)
    run = None
    if picture:
        run = _tried(case, tried[0].split, spans=True)
    return JobPlan(tried[0], tried[1:], len(splits), more_seconds, shared, measured, assumed, run)


def _savings(case: _Case) -> list[str]:
    """Describe what policies that share engines save."""
    return [
        f"{', '.join(members)}: {len(members)} roles on one group: 1 base instead of "
        f"{len(members)}, {len(members) - 1} x {case.rates.weights_text(name)} less for each engine"
        for name, members in case.fleets.items()
        if len(members) > 1
    ]


def _case(
    spec: JobSpec,
    costs: DeviceCosts,
    hosts: int,
    per_host: int,
    habits: Habits,
    profile: JobProfile | None = None,
) -> _Case:
    shapes: dict[str, ModelShape] = {}
    for name, policy in spec.policies.items():
        if policy.model is None:
            raise InvalidArgument(
                f"policy {name} is a network, not a language model",
                field=f"policies.{name}",
                value="network",
                remedy="Networks train on one device or on CPUs; docs/networks.md says how.",
            )
        if policy.simulated is not None:
            continue
        shape = read_shape(policy.model)
        if shape is None:
            raise InvalidArgument(
                f"the size of policy {name} is unknown here: this machine cannot read the "
                "model's configuration, or has no rule for its architecture",
                field=f"policies.{name}.model",
                value=str(policy.model.path or "config"),
                remedy="Run it on a host that has the checkpoint, or give `model.config`.",
            )
        shapes[name] = shape
    pipeline = spec.pipeline
    started = pipeline.group_size + pipeline.redundant_trajectories
    workload: Workload = (
        _workload(spec, habits, started) if profile is None else profile.workload(started)
    )
    sample = min(pipeline.queries_per_step, max(8, 256 // pipeline.group_size))
    scale = pipeline.queries_per_step / sample
    decoded, read, rows = (dict.fromkeys(spec.policies, 0.0) for _ in range(3))
    contexts: dict[str, list[int]] = {name: [] for name in spec.policies}
    longest = 0.0
    for index in range(sample):
        # Redundant trajectories end with their group: bounds count the shortest ones only.
        for trajectory in sorted(workload(index), key=_drawn)[: pipeline.group_size]:
            longest = max(longest, _drawn(trajectory))
            for turn in trajectory.turns:
                kept = 0 if spec.policies[turn.policy].simulated else turn.shared
                _add(turn, turn.prompt - kept, decoded, read, rows, contexts, scale)
    context = {name: _mean(some) for name, some in contexts.items()}
    on_engines = dict(context)
    for group in engine_groups(spec):
        every = [one for name in group.policies for one in contexts[name]]
        on_engines.update(dict.fromkeys(group.policies, _mean(every)))
    rates = JobRates(spec, costs, shapes, context, on_engines, profile)
    return _Case(
        spec, costs, hosts, per_host, workload, rates, context, decoded, read, rows, longest
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))


def _drawn(trajectory: TwinTrajectory) -> int:
    """Return the response tokens of a trajectory."""
    return sum(turn.response for turn in trajectory.turns)


def _add(
    turn: TwinTurn,
    new: int,
    decoded: dict[str, float],
    read: dict[str, float],
    rows: dict[str, float],
    contexts: dict[str, list[int]],
    scale: float,
) -> None:
    decoded[turn.policy] += scale * turn.response
    read[turn.policy] += scale * new
    # The trainer computes the shared tokens of a conversation's turns once.
    rows[turn.policy] += scale * (new + turn.response)
    contexts[turn.policy].append(turn.prompt + turn.response // 2)


def _workload(spec: JobSpec, habits: Habits, group_size: int) -> TeamWorkload:
    """Return the trajectories of the job's agents, `group_size` per query. Agents of one policy
    become turns of it, one after another."""
    policies, responses, most = [], {}, 0
    for one in spec.agents.values():
        policies.append(one.policy)
        drawn = one.sampling.max_new_tokens
        mean = habits.response_tokens or drawn / 3
        responses[one.policy] = Lengths(min(mean, drawn), habits.response_sigma, drawn)
        most = max(most, spec.policies[one.policy].engine.max_context or 32_768)
    return TeamWorkload(
        agents=tuple(policies),
        rounds=Lengths(habits.turns, 0.3),
        prompt=Lengths(habits.prompt_tokens, 0.3),
        response=Lengths(habits.response_tokens or 256.0, habits.response_sigma),
        wait=Lengths(habits.wait_seconds, habits.wait_sigma),
        group_size=group_size,
        own_response=responses,
        most_context=most,
        seed=spec.seed,
    )


def _splits(case: _Case, devices: Sequence[Device]) -> Iterator[ClusterSplit]:
    """Yield all splits that fit into memory and can be placed."""
    spec = case.spec
    trained = set(spec.trained_policies)
    width = {name: case.rates.widths(name, case.per_host) for name in case.fleets}
    if not all(width.values()):
        return
    for engine_hosts, training_hosts, engine_devices, training_devices in _divisions(case):
        total = training_hosts * training_devices
        gangs = [_gangs(case, name, total) if name in trained else [(0, 0)] for name in case.names]
        if not all(gangs):
            continue
        for widths in itertools.product(*width.values()):
            sizes = dict(zip(width, widths, strict=True))
            counts = _shares(case, sizes, engine_devices)
            trained_by = _chosen_gangs(case, dict(zip(case.names, gangs, strict=True)), total)
            for engines, chosen in itertools.product(counts, trained_by):
                split = ClusterSplit(
                    {
                        name: PolicySplit(
                            engines[first],
                            sizes[first],
                            chosen[name][0],
                            case.rates.turns(first, sizes[first]),
                            chosen[name][1],
                            "" if first == name else first,
                        )
                        for name in case.names
                        for first in case.rates.members[name][:1]
                    },
                    engine_hosts,
                    training_hosts,
                    engine_devices,
                    training_devices,
                )
                if _placed(case, split, devices):
                    yield split


def _divisions(case: _Case) -> Iterator[tuple[int, int, int, int]]:
    """Yield (hosts with engines, with trainers, devices of engines on each, devices of
    trainers)."""
    hosts, each = case.hosts, case.per_host
    if not case.spec.trained_policies:
        yield hosts, 0, each, 0
    elif case.colocated:
        yield hosts, hosts, each, each
    elif hosts == 1:
        for training in range(1, each):
            yield 1, 1, each - training, training
    else:
        steps = sorted({max(1, round(hosts * part / 16)) for part in range(1, 16)})
        for training in steps:
            if training < hosts:
                yield hosts - training, training, each, each


def _gangs(case: _Case, name: str, devices: int) -> list[tuple[int, int]]:
    """Return (devices, bytes on each) of the gangs that can train a policy, small first."""
    if case.rates.simulated(name) is not None:
        return [(1, case.rates.trainer_bytes(name, 1))]  # it has no ranks
    found = []
    size = 1
    while size <= _most_ranks(case, devices):
        needed = case.rates.trainer_bytes(name, size)
        if needed <= SOLD * case.device.memory:
            found.append((size, needed))
        size *= 2
    return found


def _most_ranks(case: _Case, devices: int) -> int:
    """Return the ranks of the largest gang that the job may have on so many devices."""
    return min(1, devices) if case.spec.pipeline.deterministic else devices


def _chosen_gangs(
    case: _Case, fitting: Mapping[str, list[tuple[int, int]]], devices: int
) -> list[dict[str, tuple[int, int]]]:
    """Return the gangs of all policies to try: the smallest of each; the largest, which take turns;
    and gangs that train side by side, larger for policies with more computation."""

    def seconds(name: str, size: int) -> float:
        return case.rows[name] / case.rates.trainer(name, size).backward_tokens_per_second

    found = [{name: gangs[0] for name, gangs in fitting.items()}]
    sizes = {name: [size for size, _ in gangs] for name, gangs in fitting.items()}
    filled = fill_gangs(sizes, seconds, devices)
    side = {name: gangs[sizes[name].index(filled[name])] for name, gangs in fitting.items()}
    for more in (side, {name: gangs[-1] for name, gangs in fitting.items()}):
        if more not in found:
            found.append(more)
    return found


def _shares(case: _Case, widths: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """Return the engines of each policy on a host, by work: one each, then one more for the policy
    with the most work per engine; of policies that share them, under the first. With few policies
    also the shares with one engine moved to another policy, since an engine's work depends on its
    queue. Empty: there is no room for one engine each."""
    work = {name: _engine_seconds(case, name, widths[name]) for name in widths}
    engines = fill_engines(widths, work, devices)
    if not engines:
        return []
    left = devices - sum(engines[name] * width for name, width in widths.items())
    found = [engines]
    if len(widths) <= _SHARED_ANEW:
        for source, target in itertools.permutations(widths, 2):
            if engines[source] > 1 and widths[source] + left >= widths[target]:
                moved = {source: engines[source] - 1, target: engines[target] + 1}
                found.append(engines | moved)
    return found


def _engine_seconds(case: _Case, name: str, tensor_parallel: int) -> float:
    """Return the seconds that one engine of a policy needs for a step's prefill and decoding, also
    of the policies that share it, with a full batch."""
    rates = case.rates.engine(name, tensor_parallel)
    turns = max(1, min(case.rates.turns(name, tensor_parallel), 64))
    each = rates.decode_seconds / turns + rates.decode_seconds_per_turn
    decoded, read = (
        sum(of[one] for one in case.rates.members[name]) for of in (case.decoded, case.read)
    )
    return decoded * each + read / rates.prefill_tokens_per_second


def _placed(case: _Case, split: ClusterSplit, devices: Sequence[Device]) -> bool:
    """Return whether the hosts have room for all engines and gangs."""
    each = case.per_host
    hosts = [
        DeviceHost(
            f"h{number}",
            tuple(replace(one, index=i) for i, one in enumerate(devices[:each])),
        )
        for number in range(case.hosts)
    ]
    if case.colocated:
        return True
    wanted = [
        DeviceRequest(
            f"{name}/engine", "engine", one.engines * split.engine_hosts, one.tensor_parallel
        )
        for name in case.fleets
        for one in [split.policies[name]]
    ]
    # Gangs that take turns on the same trainers need no separate devices.
    if gang := max(one.gang for one in split.policies.values()):
        wanted.append(DeviceRequest("trainer", "trainer", gang))
    return not place(hosts, wanted).refusals


def _bound(case: _Case, split: ClusterSplit) -> float:
    """Return a lower bound of the seconds of a step: engines, trainers, or both alternately."""
    rollout = max(
        _engine_seconds(case, name, one.tensor_parallel) / (one.engines * split.engine_hosts)
        for name in case.fleets
        for one in [split.policies[name]]
    )
    slowest = max(
        case.longest / max(1, len(case.names)) * _turn_seconds(case, name, one.tensor_parallel)
        for name, one in split.policies.items()
    )
    training = 0.0
    total = split.devices[1]
    for name, one in split.policies.items():
        if one.gang:
            rates = case.rates.trainer(name, one.gang)
            seconds = case.rows[name] / rates.backward_tokens_per_second + rates.step_seconds
            training += seconds * one.gang / max(1, total)
    rollout = max(rollout, slowest)
    if case.spec.pipeline.mode in ("serial", "sync"):
        return rollout + training
    return max(rollout, training) + 0.05 * min(rollout, training)


def _turn_seconds(case: _Case, name: str, tensor_parallel: int) -> float:
    rates = case.rates.engine(name, tensor_parallel)
    return rates.decode_seconds + 8 * rates.decode_seconds_per_turn


def twin_of(case: _Case, split: ClusterSplit) -> TwinJob:
    """Return the twin's job for a split of the cluster."""
    spec, pipeline = case.spec, case.spec.pipeline
    policies = {}
    for name, one in split.policies.items():
        running = min(one.engine_turns, spec.policies[name].engine.max_running or one.engine_turns)
        rates = case.rates.engine(name, one.tensor_parallel, running)
        fleet = EngineFleet(
            one.engines,
            rates,
            limit=max(1, running),
            devices=one.tensor_parallel,
            adapters=case.rates.loads_beside(name),
        )
        policies[name] = TwinPolicy(
            (fleet,),
            case.rates.trainer(name, max(1, one.gang)),
            ranks=max(1, one.gang),
            state_bytes=one.trainer_bytes // 2,
            trained=one.gang > 0,
            alpha=spec.alpha_of(name),
            minimum=spec.balancing.minimum_of(name),
        )
    if case.simulated:
        # Their trainer workers are processes without devices, as started by `troupe up --trainers`.
        trainers = single_rank_workers(split.devices[1])
    else:
        trainers = [
            RankWorker(
                f"trainer{number:04}",
                memory=case.device.memory,
                device="cuda",
                devices=split.training_devices,
                host=f"host{number:04}",
            )
            for number in range(split.training_hosts)
        ]
    balancing, barred = _balancing(spec, split)
    routing = spec.routing
    switch = 0.0
    if case.colocated:
        switch = max(one.trainer_bytes / case.device.host_link for one in split.policies.values())
    return TwinJob(
        policies=policies,
        workload=case.workload,
        trainers=trainers,
        mode=pipeline.mode,
        queries_per_step=pipeline.queries_per_step,
        micro_batch=pipeline.micro_batch_samples,
        in_flight=spec.limits.max_concurrent_trajectories,
        spare=pipeline.over_sampling,
        redundant=pipeline.redundant_trajectories,
        rollout_workers=split.engine_hosts,
        # The plan has one class of device, so that `affinity` has no choice.
        routing=RoutingRules(
            routing.policy, routing.sticky, routing.priority, routing.adaptive_limit
        ),
        balancing=balancing,
        groups=[members for members in case.fleets.values() if len(members) > 1],
        barred=barred,
        switch_seconds=switch,
        share_prefixes=not case.simulated,
        prefix_cache=not case.simulated,
        control=_CONTROL,
    )


def _balancing(spec: JobSpec, split: ClusterSplit) -> tuple[BalancingRules | None, frozenset[Pair]]:
    """Return the rules by which the twin moves engines between the policies of a split, and the
    pairs between which no engine moves; no rules if engines stay with their policies."""
    # The twin models neither restarts of engines nor backlogs in tokens; see `_unmodelled`.
    section = spec.balancing.model_copy(update={"rebuild": False})
    policies = {}
    for name, policy in spec.policies.items():
        one = split.policies[name]
        fields = {"replicas": one.engines, "tensor_parallel": one.tensor_parallel}
        policies[name] = policy.model_copy(
            update={"engine": policy.engine.model_copy(update=fields)}
        )
    moves = section.inter is not False and section.measure == "turns"
    shared = shared_policies(spec)
    if not (moves and section.possible(policies, shared)):
        return None, frozenset()
    return section.rules, section.barred(policies, shared)


def _unmodelled(spec: JobSpec) -> list[str]:
    """Describe the job's settings that the trials omit."""
    section, found = spec.balancing, []
    if spec.slots:
        found.append(
            "learners draw all turns, none of them members; each slot (`population.slots`) has one "
            "engine"
        )
    if spec.offline is not None:
        found.append(f"no step learns from rows (the first {spec.offline.steps} do)")
    if 0 < len(spec.colocated) < len(spec.policies):
        found.append("engines and trainers of all policies have devices of their own (`colocate`)")
    if spec.balances and section.measure == "tokens":
        found.append("engines stay with their policies (`balancing.measure: tokens`)")
    elif spec.balances and section.rebuild:
        found.append("engines move between equal policies only (without `balancing.rebuild`)")
    return found


def _predict(case: _Case, split: ClusterSplit) -> Prediction:
    means = _tried(case, split).means(1)
    return Prediction(split, means, _bottleneck(means))


def _tried(case: _Case, split: ClusterSplit, spans: bool = False) -> TwinRun:
    """Run a split in the twin for `_STEPS` steps; `spans`: with every busy time."""
    # In mode async the rollout of a later step is under way when a step ends.
    late = 1 if case.spec.pipeline.mode == "async" else 0
    run = Twin(replace(twin_of(case, split), spans=spans)).run(_STEPS + late)
    return replace(run, steps=run.steps[:_STEPS])


def _bottleneck(means: TwinMeans) -> Bottleneck:
    """Return the component that a step waits for most."""
    if means.neither > 0.5 * means.seconds:
        return "hand-over"
    if means.trainers > 1 - 2 * _SLACK or means.training_alone > means.rollout_alone:
        return "trainers"
    if means.engines < 0.5 and means.rollout_alone > _SLACK * means.seconds:
        return "longest trajectories"
    return "engines"


def _too_small(case: _Case) -> InvalidArgument:
    """Return an error that states what the cluster lacks for the job."""
    total = case.hosts * case.per_host
    gib = 1 << 30
    lacking = []
    for name in case.names:
        if not case.rates.widths(name, case.per_host):
            lacking.append(
                f"no engine of {name} fits on {case.per_host} devices of one host: its weights "
                f"alone are {case.rates.weights_text(name)}"
            )
        elif name in case.spec.trained_policies and not _gangs(case, name, total):
            ranks = _most_ranks(case, total)
            needed = case.rates.trainer_bytes(name, ranks)
            over = "1 device" if ranks == 1 else f"{ranks} devices"
            lacking.append(
                f"training {name} over {over} needs {needed / gib:.0f} GB on each, "
                f"which have {case.device.memory / gib:.0f} GB"
            )
    if not lacking:
        engines = sum(case.rates.widths(name, case.per_host)[0] for name in case.fleets)
        gangs = max(
            (_gangs(case, name, total)[0][0] for name in case.spec.trained_policies), default=0
        )
        lacking.append(
            f"an engine of each policy takes {engines} devices and the largest gang {gangs}"
        )
    return InvalidArgument(
        f"the job does not fit: {'; '.join(lacking)}",
        field="devices",
        value=f"{total}x{case.device.name}-{case.device.memory / gib:.0f}GB",
        remedy="Add devices or hosts, keep moments on the host (`trainer.offload: optimizer`), "
        "train adapters (`lora`), or smaller models.",
    )


def _devices(devices: Sequence[Device], case: _Case) -> list[Device]:
    """Return the devices of a cluster of `case.hosts` hosts like the given ones."""
    return [replace(devices[0], index=number) for number in range(case.hosts * case.per_host)]
