"""Prometheus metrics of the rollout service. Names are in docs/operating.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.chassis.telemetry import Telemetry
from services.rollout.jobs import JobTable
from services.rollout.trajectories.runner import Runner
from troupe.contracts import metric_names
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow.environments.host import COUNTERS, Counters


class EnvironmentCollector(Collector):
    """A collector of the environment library's counters, which is independent of Prometheus, at
    every scrape."""

    def __init__(self, counters: Counters = COUNTERS) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield one series per kind of event and environment."""
        family = CounterMetricFamily(
            "troupe_rollout_environment_events",
            "Resets, steps, retries, faults, kills, starts and illegal moves of environments.",
            labels=["event", "environment"],
        )
        for (event, environment), count in sorted(self._counters.all().items()):
            family.add_metric([event, environment], count)
        yield family


class UpdateCollector(Collector):
    """A collector of the last weight update of every engine, at every scrape."""

    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield seconds per engine, `part` is `exposed` or `total`; and its fallbacks."""
        family = GaugeMetricFamily(
            "troupe_rollout_engine_update_seconds",
            "Last weight update of an engine by path: seconds without service, and in total.",
            labels=["job_id", "policy", "engine_id", "way", "part"],
        )
        fallbacks = CounterMetricFamily(
            "troupe_rollout_engine_update_fallbacks",
            "Updates that came from host memory instead of the trainer's devices.",
            labels=["job_id", "policy", "engine_id"],
        )
        for job in self._jobs.all():
            for name, policy in sorted(job.policies.items()):
                for status in policy.statuses(job.job_id, ""):
                    if not status.update_way:
                        continue
                    labels = [job.job_id, name, status.engine_id]
                    fallbacks.add_metric(labels, status.update_fallbacks)
                    labels = [*labels, status.update_way]
                    family.add_metric([*labels, "exposed"], status.update_exposed_seconds)
                    family.add_metric([*labels, "total"], status.update_seconds)
        yield family
        yield fallbacks


class RolloutMetrics:
    """Counters that are updated when a trajectory ends, and gauges that are read when scraped."""

    def __init__(self, telemetry: Telemetry, jobs: JobTable, runner: Runner) -> None:
        by_policy = ["job_id", "policy"]
        self._trajectories = telemetry.counter(
            "troupe_rollout_trajectories", "Trajectories ended.", ["job_id", "state", "reason"]
        )
        self._turns = telemetry.counter("troupe_rollout_turns", "Turns generated.", by_policy)
        self._tokens = telemetry.counter(
            "troupe_rollout_tokens", "Tokens of turns.", ["job_id", "policy", "kind"]
        )
        self._queued = telemetry.histogram(
            "troupe_rollout_queue_seconds", "Time a turn waited.", by_policy
        )
        self._generated = telemetry.histogram(
            "troupe_rollout_generate_seconds", "Time a turn was generated.", by_policy
        )
        self._seconds = telemetry.histogram(
            "troupe_rollout_trajectory_seconds", "Time a trajectory ran.", ["job_id"]
        )
        self._exposed = telemetry.counter(
            "troupe_rollout_weight_update_exposed_seconds",
            "Seconds in which engines could not serve because of updates.",
            by_policy,
        )
        self._transfer = telemetry.counter(
            "troupe_rollout_weight_transfer_seconds",
            "Seconds that weights took from other hosts, while engines served the version before.",
            by_policy,
        )
        self._moves = telemetry.histogram(
            "troupe_rollout_engine_move_seconds",
            "Time in which an engine did not serve while it changed its policy.",
            ["job_id", "source", "target"],
        )
        self._breaks = telemetry.counter(
            "troupe_rollout_prefix_breaks",
            "Turns whose history differed from the agent's own replies, and was tokenised again.",
            ["job_id"],
        )
        self._endpoint = telemetry.counter(
            "troupe_rollout_endpoint_requests", "Answers of the endpoint.", ["call", "status"]
        )
        self._lost = telemetry.counter(
            "troupe_rollout_turns_lost",
            "Turns that lost their engine, by outcome.",
            ["job_id", "policy", "outcome"],
        )
        self._resumed = telemetry.counter(
            "troupe_rollout_resumed_tokens",
            "Tokens of turns that lost their engine and were kept.",
            by_policy,
        )
        # Cached: looking up a labelled metric costs more than counting on it.
        self._of: Callable[..., Any] = functools.cache(
            lambda metric, *labels: metric.labels(*labels)
        )
        self._jobs = jobs
        telemetry.registry.register(EnvironmentCollector())
        telemetry.registry.register(UpdateCollector(jobs))
        self._retries = telemetry.counter(
            "troupe_rollout_trajectory_retries",
            "Attempts at trajectories that failed in their environment and were repeated.",
            ["job_id"],
        )
        in_flight = telemetry.gauge("troupe_rollout_in_flight", "Trajectories in flight.")
        in_flight.set_function(lambda: len(runner))
        waiting = telemetry.gauge("troupe_rollout_turns_waiting", "Turns that no engine has yet.")
        waiting.set_function(
            lambda: sum(p.router.waiting for job in jobs.all() for p in job.policies.values())
        )

    def ended(self, job_id: str, event: rollout_pb.TrajectoryEvent) -> None:
        """Count a trajectory and its turns."""
        state = common_pb.TrajectoryState.Name(event.state).removeprefix("TRAJECTORY_STATE_")
        # Only the kind before the colon: the message would make a series per trajectory.
        kind = event.reason.partition(":")[0]
        self._trajectories.labels(job_id, state, kind).inc()
        self._seconds.labels(job_id).observe(event.seconds)
        self._count_losses(job_id)
        self._retries.labels(job_id).inc(event.metrics.get(metric_names.ENVIRONMENT_RETRIES, 0.0))
        self._breaks.labels(job_id).inc(event.metrics.get("prefix_breaks", 0.0))
        for turn in event.turns:
            labels = (job_id, turn.policy)
            self._of(self._turns, *labels).inc()
            self._of(self._tokens, *labels, "prompt").inc(turn.prompt_tokens)
            self._of(self._tokens, *labels, "cached").inc(turn.cached_tokens)
            self._of(self._tokens, *labels, "response").inc(turn.response_tokens)
            self._of(self._queued, *labels).observe(turn.queue_seconds)
            self._of(self._generated, *labels).observe(turn.generate_seconds)

    def endpoint_answered(self, call: str, status: int) -> None:
        """Count a response of the endpoint."""
        self._endpoint.labels(call, str(status)).inc()

    def _count_losses(self, job_id: str) -> None:
        for job in self._jobs.all():
            if job.job_id != job_id:
                continue
            for name, policy in job.policies.items():
                losses = policy.router.take_losses()
                if losses.resumed_turns:
                    self._lost.labels(job_id, name, "resumed").inc(losses.resumed_turns)
                    self._resumed.labels(job_id, name).inc(losses.resumed_tokens)
                if losses.restarted_turns:
                    self._lost.labels(job_id, name, "restarted").inc(losses.restarted_turns)

    def updated(
        self, job_id: str, policy: str, exposed_seconds: float, transfer_seconds: float
    ) -> None:
        """Record a weight update: seconds without service, and seconds of the transfer."""
        self._exposed.labels(job_id, policy).inc(exposed_seconds)
        self._transfer.labels(job_id, policy).inc(transfer_seconds)

    def moved(self, job_id: str, source: str, target: str, seconds: float) -> None:
        """Record an engine that changed its policy."""
        if source != target:
            self._moves.labels(job_id, source, target).observe(seconds)
