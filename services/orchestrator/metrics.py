"""Prometheus metrics of the orchestrator: running jobs, workers, engines, policies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.orchestrator.placement.workers import NAMES, WorkerHandle
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import TERMINAL
from troupe.v1 import common_pb2 as common_pb

_ACTIVE: Final = (
    common_pb.JOB_STATE_SUBMITTED,
    common_pb.JOB_STATE_STARTING,
    common_pb.JOB_STATE_RUNNING,
    common_pb.JOB_STATE_PAUSING,
    common_pb.JOB_STATE_CANCELLING,
)
# Values of a series' labels, in their order.
_Labels: TypeAlias = tuple[str, ...]
# States of engines that generate with a verified version: while a new one is loaded, running turns
# continue with the old one.
_SERVING: Final = (
    common_pb.ENGINE_STATE_HEALTHY,
    common_pb.ENGINE_STATE_UPDATING,
    common_pb.ENGINE_STATE_SUSPECT,
)
_WORKER_STATES: Final = ("usable", "draining", "lost")


class ClusterCollector(Collector):
    """Exporter of the orchestrator's jobs and newest heartbeats. Runs in the thread of the metrics
    server, and only reads memory.

    Empty states also have a series, so that alerts can compare them with 0.
    """

    def __init__(
        self,
        store: JobStore,
        workers: Callable[[], Sequence[WorkerHandle]],
        in_flight: Mapping[str, int],
    ) -> None:
        """`in_flight`: trajectories in flight by job id."""
        self._store, self._workers, self._in_flight = store, workers, in_flight

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield all families; families of jobs, policies and engines may be empty."""
        yield from self._jobs()
        workers = self._workers()
        yield from _of_workers(workers)
        yield from _of_engines([one for one in workers if one.alive])

    def _jobs(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        live, ended = list(self._store.live.items()), self._store.ended
        count = Counter(job.state for _, job in live)
        jobs = _gauge("troupe_jobs", "Jobs that this orchestrator runs.", "state")
        for state in _ACTIVE:
            jobs.add_metric([_job_state(state)], count[state])
        yield jobs
        over = CounterMetricFamily(
            "troupe_jobs_ended", "Jobs that ended since the orchestrator started.", labels=["state"]
        )
        for state in sorted(TERMINAL):
            over.add_metric([_job_state(state)], ended[state])
        yield over
        steps = _gauge("troupe_job_steps", "Steps done by a job that runs.", "job_id")
        newest = _gauge(
            "troupe_job_metric",
            "Values of the newest step, and of the newest evaluation, of a job that runs, as they "
            "are in metrics.jsonl.",
            "job_id",
            "name",
        )
        # Not from the bindings that trainers report: a policy waiting for a trainer has none.
        versions = _gauge(
            "troupe_policy_version", "Newest weight version of a policy.", "job_id", "policy"
        )
        for job_id, job in live:
            steps.add_metric([job_id], job.step)
            for policy, version in list(job.versions.items()):
                versions.add_metric([job_id, policy], version)
            for name, value in job.values().items():
                newest.add_metric([job_id, name], value)
        yield from (steps, newest, versions)
        flying = _gauge("troupe_job_in_flight", "Trajectories dispatched and not ended.", "job_id")
        for job_id, number in list(self._in_flight.items()):
            flying.add_metric([job_id], number)
        yield flying


def _of_workers(workers: Sequence[WorkerHandle]) -> Iterator[GaugeMetricFamily]:
    count: Counter[_Labels] = Counter()
    rss = _gauge("troupe_worker_rss_bytes", "Resident memory of a worker.", "kind", "worker")
    busy = _gauge(
        "troupe_trainer_utilization", "Share of the last seconds that a trainer computed.", "worker"
    )
    for worker in workers:
        kind = NAMES.get(worker.kind, "unknown")
        state = "lost" if not worker.alive else "draining" if worker.beat.draining else "usable"
        count[kind, state] += 1
        if worker.alive:
            rss.add_metric([kind, worker.worker_id], worker.beat.rss_bytes)
            if worker.beat.HasField("trainer"):
                busy.add_metric([worker.worker_id], worker.beat.trainer.utilization)
    known = _gauge("troupe_workers", "Workers, lost ones for two minutes.", "kind", "state")
    for kind in NAMES.values():
        for state in _WORKER_STATES:
            known.add_metric([kind, state], count[kind, state])
    yield from (known, rss, busy)


def _of_engines(workers: Sequence[WorkerHandle]) -> Iterator[GaugeMetricFamily]:
    keys = ("job_id", "policy")
    count: Counter[_Labels] = Counter()
    turns: Counter[_Labels] = Counter()
    speed: defaultdict[_Labels, float] = defaultdict(float)
    oldest: dict[_Labels, int] = {}
    hosts: defaultdict[_Labels, set[str]] = defaultdict(set)
    for worker in workers:
        for engine in worker.beat.engines:
            hosts[(engine.job_id,)].add(engine.host or engine.engine_id)
            key = engine.job_id, engine.policy
            for state in common_pb.EngineState.values()[1:]:
                count[(*key, _engine_state(state))] += engine.state == state
            turns[(*key, "running")] += engine.running
            turns[(*key, "waiting")] += engine.waiting
            speed[key] += engine.tokens_per_second
            if engine.HasField("version") and engine.state in _SERVING:
                oldest[key] = min(engine.version, oldest.get(key, engine.version))
    yield _filled(_gauge("troupe_engines", "Engines.", *keys, "state"), count)
    text = "Servers and embedded models, which engines of several policies may share."
    yield _filled(
        _gauge("troupe_engine_hosts", text, "job_id"),
        {key: len(some) for key, some in hosts.items()},
    )
    yield _filled(_gauge("troupe_engine_turns", "Turns in engines.", *keys, "state"), turns)
    text = "Tokens that the engines of a policy draw per second."
    yield _filled(_gauge("troupe_engine_tokens_per_second", text, *keys), speed)
    text = "Oldest weight version that an engine of a policy serves."
    yield _filled(_gauge("troupe_engine_oldest_version", text, *keys), oldest)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _filled(family: GaugeMetricFamily, values: Mapping[_Labels, float]) -> GaugeMetricFamily:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _job_state(state: common_pb.JobState.ValueType) -> str:
    return common_pb.JobState.Name(state).removeprefix("JOB_STATE_").lower()


def _engine_state(state: common_pb.EngineState.ValueType) -> str:
    return common_pb.EngineState.Name(state).removeprefix("ENGINE_STATE_").lower()
