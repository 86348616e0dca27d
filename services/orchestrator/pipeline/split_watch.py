"""Assessment of a running job's split between engines and trainers, from its newest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from services.orchestrator.context import JobContext
from services.orchestrator.placement.engines import Engines
from troupe.contracts import metric_names
from troupe.scheduling.defaults import CPU
from troupe.twin.hints import MOST_STEPS, PolicyUse, StepUse, split_metrics
from troupe.twin.profile import JobProfile
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


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
        if not self._warm:
            self._warm = True
            return {}
        if not totals.trajectories:
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
        waits = max(0.0, totals.seconds - totals.engine_seconds)
        self._steps.append(
            StepUse(
                values[metric_names.STEP_SECONDS],
                values.get(metric_names.ROLLOUT_SECONDS, 0.0),
                totals.trajectories,
                totals.seconds / totals.trajectories,
                waits / totals.trajectories,
                policies,
            )
        )
        times = self._profile.policies
        speeds = {name: times[name].engine.speed() for name in policies}
        workers = shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER)
        return split_metrics(
            self._steps,
            {name: one for name, one in speeds.items() if one is not None},
            mode=spec.pipeline.mode,
            in_flight=spec.limits.max_concurrent_trajectories,
            # Ranks on a CPU share the CPU.
            trainers=sum(
                max(1, one.beat.trainer.ranks) if one.beat.trainer.device == "cuda" else 1
                for one in workers
            ),
        )
