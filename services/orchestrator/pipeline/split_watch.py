"""Assessment of a running job's split between engines and trainers, from its newest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import metric_names
from troupe.job import JobSpec
from troupe.job.engines.sharing import engine_groups
from troupe.scheduling.defaults import CPU
from troupe.twin.hints import JOINT, MOST_STEPS, PolicyUse, StepUse, split_metrics
from troupe.twin.profile import JobProfile
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Fraction of a core that must have been idle for one more engine or rank.
_IDLE_CORE: Final = 0.9
_Cpus = Mapping[str, orchestrator_pb.HostCpu]


class StepTotals:
    """Sums over the trajectories of a step that ended while this process ran it."""

    def __init__(self) -> None:
        self.trajectories = 0
        self.seconds = self.engine_seconds = 0.0
        self.turns: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.drawn: dict[str, int] = {}

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count an ended trajectory."""
        self.trajectories += 1
        self.seconds += event.seconds
        for turn in event.turns:
            name = turn.policy
            self.engine_seconds += turn.queue_seconds + turn.generate_seconds
            self.turns[name] = self.turns.get(name, 0) + 1
            read = max(0, turn.prompt_tokens - turn.cached_tokens)
            self.read[name] = self.read.get(name, 0) + read
            self.drawn[name] = self.drawn.get(name, 0) + turn.response_tokens


class SplitWatch:
    """The newest steps of a job, in the form of `split_metrics`."""

    def __init__(self, job: JobContext, engines: Engines, profile: JobProfile) -> None:
        self._job, self._engines, self._profile = job, engines, profile
        self._steps: deque[StepUse] = deque(maxlen=MOST_STEPS)
        # The CPUs of workers' hosts at the end of each step, by host.
        self._cpus: deque[_Cpus] = deque(maxlen=MOST_STEPS + 1)
        # The first step of a runner warms up engines and trainers.
        self._warm = False

    def metrics(self, totals: StepTotals, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step with these totals and `values`. Empty if other jobs share
        the cluster, since their use of it is unknown, and for jobs of networks and populations."""
        spec, shared = self._job.spec, self._job.shared
        alone = len(shared.store.live) <= 1
        languages = all(one.model is not None for one in spec.policies.values())
        if not (alone and languages and spec.population is None and not spec.colocated):
            return {}
        workers = [one for one in shared.workers.all() if one.usable]
        self._cpus.append({one.beat.host_id: one.beat.cpu for one in workers})
        if not self._warm:
            self._warm = True
            return {}
        if not totals.turns:  # also of rows to learn from, which no engine plays
            return {}
        counts = self._engines.counts
        policies = {}
        for name, policy in spec.policies.items():
            if not totals.turns.get(name):
                continue
            train, publish = (
                values.get(f"{name}/{what}", 0.0)
                for what in (metric_names.TRAIN_SECONDS, metric_names.PUBLISH_SECONDS)
            )
            policies[name] = PolicyUse(
                engines=max(1, counts.get(name, 0)),
                limit=policy.engine.max_running or CPU.max_running,
                turns=totals.turns[name],
                read_tokens=totals.read[name],
                drawn_tokens=totals.drawn[name],
                train_seconds=train + publish,
                gang=policy.trainer.ranks,
            )
        if not (idle := idle_cores(self._cpus)):  # steps shorter than heartbeats
            return {}
        waits = max(0.0, totals.seconds - totals.engine_seconds)
        self._steps.append(
            StepUse(
                values[metric_names.STEP_SECONDS],
                values.get(metric_names.ROLLOUT_SECONDS, 0.0),
                totals.trajectories,
                totals.seconds / totals.trajectories,
                waits / totals.trajectories,
                policies,
                [group.policies for group in engine_groups(spec)],
            )
        )
        times = self._profile.policies
        speeds = {name: times[name].engine.speed() for name in policies}
        return split_metrics(
            self._steps,
            {name: one for name, one in speeds.items() if one is not None},
            mode=spec.pipeline.mode,
            in_flight=spec.limits.max_concurrent_trajectories,
            # Ranks on a CPU share the CPU.
            trainers=sum(
                max(1, one.beat.trainer.ranks) if one.beat.trainer.device == "cuda" else 1
                for one in workers
                if one.kind == orchestrator_pb.WORKER_KIND_TRAINER
            ),
            lacking=lacking(spec, workers, shared.nodes.alive().values(), idle),
        )


def idle_cores(cpus: Sequence[_Cpus]) -> dict[str, float]:
    """Return the mean number of idle cores of each host between the first and the last of its
    reports."""
    idle = {}
    for host, last in cpus[-1].items():
        first = next(one[host] for one in cpus if host in one)
        if (seconds := last.at - first.at) > 0:
            idle[host] = max(0.0, last.cores - (last.busy_seconds - first.busy_seconds) / seconds)
    return idle


def lacking(
    spec: JobSpec,
    workers: Sequence[WorkerHandle],
    nodes: Iterable[orchestrator_pb.JoinNodeRequest],
    idle: Mapping[str, float],
) -> dict[str, str]:
    """Return the changes of a job's split (`engine/P`, `trainer`, `gang/P`) for which the cluster
    has nothing free: "core" or "device", by change.

    `idle`: idle cores by host. Attached servers run on devices of which the cluster knows nothing,
    and simulated policies need none.
    """
    rollouts = [one for one in workers if one.kind == orchestrator_pb.WORKER_KIND_ROLLOUT]
    trainers = [one for one in workers if one.kind == orchestrator_pb.WORKER_KIND_TRAINER]
    # Devices that no worker was given.
    spare = sum(
        not device.process and device.device_class.lower() != "cpu"
        for node in nodes
        for device in node.devices
    )
    # Engines are added to every rollout worker alike.
    engine_devices = min((_free_devices(one) for one in rollouts), default=0)
    on_devices = any(one.beat.devices for one in rollouts)
    computed = {
        name: policy.trainer.ranks
        for name, policy in spec.policies.items()
        if policy.trainable and policy.simulated is None
    }
    trains_on_devices = any(one.beat.trainer.device == "cuda" for one in trainers)
    training_devices = sum(max(1, one.beat.trainer.ranks) for one in trainers)
    unused = spare + max(0, training_devices - sum(computed.values()))

    def cores(needed: float, group: Sequence[WorkerHandle]) -> bool:
        """Return whether one of the hosts of these workers has idle cores."""
        return any(idle.get(one.beat.host_id, 0.0) >= _IDLE_CORE * needed for one in group)

    missing = {}
    group_of = {name: one.policies for one in engine_groups(spec) for name in one.policies}
    for name, policy in spec.policies.items():
        # Engines that policies share are one change, which a host is needed for once.
        if (group := group_of.get(name, (name,)))[0] != name:
            continue
        change = f"engine/{JOINT.join(group)}"
        if policy.simulated is not None or policy.engine.urls:
            continue
        if on_devices:
            if max(engine_devices, spare) < policy.engine.tensor_parallel:
                missing[change] = "device"
        elif not cores(1, rollouts):
            missing[change] = "core"
    for change, ranks in {"trainer": 1, **{f"gang/{n}": r for n, r in computed.items()}}.items():
        if not computed:
            break
        if trains_on_devices:
            if (spare if change == "trainer" else unused) < ranks:
                missing[change] = "device"
        elif not cores(ranks, trainers):
            missing[change] = "core"
    return missing


def _free_devices(worker: WorkerHandle) -> int:
    return sum(not one.holders for one in worker.beat.devices)
