"""The orchestrator without gRPC: wiring of its parts, recovery of jobs, generation for users."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import structlog

from services.chassis.heartbeat import HostMeter, host_cpu, host_id
from services.chassis.redis import RedisWatch
from services.chassis.telemetry import Telemetry
from services.orchestrator.cluster import (
    ASKED_SECONDS,
    ClusterView,
    ended_holders,
    release_ended_jobs,
)
from services.orchestrator.context import JobContext, Shared
from services.orchestrator.crash_loops import LaunchGuard, death_limit, is_suspect
from services.orchestrator.errors import Deadline, cancel_all
from services.orchestrator.functions import Catalogue, FunctionGateway
from services.orchestrator.jobs.manager import Jobs
from services.orchestrator.jobs.queue import JobQueue
from services.orchestrator.placement.nodes import NodeRegistry, check_devices
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TrainerScheduler
from services.orchestrator.placement.workers import WorkerHandle, WorkerRegistry
from services.orchestrator.populations import on_demand
from services.orchestrator.populations.state import PopulationStore
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.host_history import HostHistory
from services.orchestrator.state.job_store import JobStore, Superseded
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import RedisAccess
from services.orchestrator.state.trajectories import KeptTrajectories
from services.orchestrator.state.weight_versions import WeightVersions
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.rpc import (
    NO_RETRY,
    FailedPrecondition,
    RetryPolicy,
    TroupeError,
    Unavailable,
    connect,
    new_id,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub

AnswerT = TypeVar("AnswerT")
_log = structlog.get_logger(__name__)
# Time limit for loading a finished job's policies and starting its engines, for generation.
_PREPARE_SECONDS: Final = 600.0
_RETRY_AFTER_MS: Final = 1000
_ACTIVE: Final = frozenset(
    {
        common_pb.JOB_STATE_SUBMITTED,
        common_pb.JOB_STATE_STARTING,
        common_pb.JOB_STATE_RUNNING,
        common_pb.JOB_STATE_PAUSING,
    }
)
# Jobs wait for an unreachable experience store, within their own limits.
_STORE_RETRY: Final = RetryPolicy(max_attempts=100_000)
_STORE_SECONDS: Final = 7200.0
_STORE_WATCH_SECONDS: Final = 5.0


class Orchestrator:
    """All parts of the orchestrator, wired together. `server` is their gRPC interface."""

    def __init__(self, settings: OrchestratorSettings, telemetry: Telemetry) -> None:
        self._redis = RedisAccess(settings.redis_url, disk=settings.data_dir)
        self._redis_watch = RedisWatch(self._redis, telemetry)
        log = EventLog(self._redis)
        store_client = settings.client(retry=_STORE_RETRY).model_copy(
            update={"deadline_seconds": _STORE_SECONDS}
        )
        self._experience = connect(settings.experience_store_address, store_client)
        no_retry = settings.client(retry=NO_RETRY)
        probed = {
            "experience_store": settings.experience_store_address,
            "reward": settings.reward_address,
        }
        self._probes: dict[str, tuple[str, grpc.aio.Channel]] = {
            name: (address, connect(address, no_retry)) for name, address in probed.items()
        }
        self._reward = connect(settings.reward_address, no_retry)
        workers = WorkerRegistry(settings)
        store = JobStore(self._redis, log, data_dir=settings.data_dir.absolute())
        experience: ExperienceStoreAsyncStub = ExperienceStoreStub(self._experience)
        self.shared = Shared(
            settings=settings,
            store=store,
            weight_versions=WeightVersions(experience, store),
            log=log,
            trajectories=KeptTrajectories(
                self._redis,
                log,
                settings.data_dir.absolute(),
                max_bytes=settings.conversation_bytes,
                tokens_cap=settings.recent_tokens,
            ),
            populations=PopulationStore(self._redis, store),
            workers=workers,
            nodes=NodeRegistry(settings),
            hosts=HostHistory(self._redis, settings.host_use_seconds),
            trainer_scheduler=TrainerScheduler(workers),
            experience=experience,
            reward=RewardStub(self._reward),
            in_flight={},
            queue=JobQueue(settings.max_running_jobs),
        )
        self.functions = FunctionGateway(Catalogue(self._redis), self.shared.reward)
        self._guard = LaunchGuard(self._redis, settings.survival_seconds)
        self.jobs = Jobs(self.shared, self._guard, self._check_job, self.functions.catalogue)
        self.generation = GenerationService(self.shared, self.jobs)
        self.cluster = ClusterView(self.shared, self._probes)
        self._store_watch: asyncio.Task[None] | None = None
        self._meter = HostMeter(settings.host_use_seconds)
        self._host_watch: list[asyncio.Task[None]] = []

    async def _check_job(self, job_id: str, spec: JobSpec) -> None:
        """Raise for a job that this cluster cannot run."""
        check_devices(
            spec,
            self.shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT),
            leaving={job_id, *await ended_holders(self.shared)},
            queued=self.shared.queue.full,
        )
        await self.functions.check_job(spec)

    async def start(self) -> None:
        """Wait for Redis, then continue every job that had not ended.

        Raises `FailedPrecondition` if Redis cannot keep jobs (`RedisClient.wait_ready`).
        """
        await self._redis.wait_ready()
        self._redis_watch.start(self._tell_jobs)
        self._store_watch = asyncio.create_task(self._watch_store(), name="store watch")
        self._meter.start()
        self._host_watch = [
            asyncio.create_task(self._watch_host(), name="own host"),
            asyncio.create_task(self.shared.hosts.run(), name="hosts"),
        ]
        self.shared.workers.start()
        self.shared.trainer_scheduler.start()
        self.functions.start()
        await recover(self.shared.store, self.jobs, self._guard)

    @property
    def problem(self) -> str | None:
        """Why `start` still waits for Redis."""
        return self._redis.problem

    async def _tell_jobs(self, trouble: TroupeError | None) -> None:
        """Tell users of running jobs that Redis has become unfit, or is fit again."""
        self.shared.log.set_trouble("redis", "" if trouble is None else str(trouble))
        if trouble is None:
            return
        for job_id in list(self.shared.store.live):
            activity = orchestrator_pb.Activity(text=str(trouble))
            self.shared.log.show(job_id, activity, with_troubles=False)
            if isinstance(trouble, FailedPrecondition):  # Redis takes a notice
                with suppress(TroupeError):
                    await self.shared.log.notice(
                        job_id, orchestrator_pb.Notice.SEVERITY_WARNING, str(trouble)
                    )

    async def _watch_store(self) -> None:
        """Check the experience store every few seconds, since calls of jobs wait for its Redis."""
        while True:
            status = await self.cluster.probe("experience_store")
            self.shared.log.set_trouble(status.name, "" if status.serving else status.message)
            await asyncio.sleep(_STORE_WATCH_SECONDS)

    async def _watch_host(self) -> None:
        """Note the use of this process' own host, which may have no worker."""
        settings = self.shared.settings
        while True:
            cpu, use = await asyncio.to_thread(host_cpu), self._meter.take()
            name = settings.node or socket.gethostname()
            self.shared.hosts.note(host_id(), name, settings.worker_id, cpu, use)
            await asyncio.sleep(settings.host_use_seconds)

    async def stop(self) -> None:
        """Stop the runners of all jobs. The jobs keep their state in Redis and the store."""
        await self._redis_watch.stop()
        self._meter.stop()
        await cancel_all(self._host_watch)
        if self._store_watch is not None:
            await cancel_all([self._store_watch])
        await self.jobs.stop()
        await self._guard.close()
        await self.functions.stop()
        await self.shared.trainer_scheduler.close()
        await self.shared.workers.close()
        probes = (channel for _, channel in self._probes.values())
        for channel in (self._experience, self._reward, *probes):
            await channel.close(None)
        await self._redis.close()


async def recover(store: JobStore, jobs: Jobs, guard: LaunchGuard) -> list[str]:
    """Launch a runner for each unfinished job; return their ids.

    Paused jobs stay paused. A job that killed the previous orchestrators fails; suspected jobs are
    launched one at a time.
    """
    continued: list[str] = []
    suspects: list[str] = []
    for job_id in await store.ids():
        record = await store.get(job_id)
        if record.broken:
            assert record.problem is not None, "the record says what is broken"
            _log.error("a job cannot be read", job_id=job_id, why=record.problem.message)
            continue
        if record.terminal or record.state == common_pb.JOB_STATE_PAUSED:
            continue
        deaths, limit = await guard.deaths(job_id), death_limit(record)
        if deaths >= limit and record.state != common_pb.JOB_STATE_CANCELLING:
            _log.error("a job is set aside", job_id=job_id, deaths=deaths)
            await jobs.set_aside(job_id, deaths)
            continue
        _log.info("job continues", job_id=job_id, state=record.state_name, step=record.step)
        if record.state != common_pb.JOB_STATE_SUBMITTED:
            jobs.keep_place(job_id)  # before any that waits is launched
        (suspects if is_suspect(deaths, limit) else continued).append(job_id)
    for job_id in continued:
        await guard.begin(job_id)
        jobs.launch(job_id)
    jobs.launch_one_by_one(suspects)
    return continued + suspects


class GenerationService:
    """Generation with a job's policies for users, during and after the job.

    A rollout worker that serves the policy answers. After the job has ended, a worker is prepared
    if there is none.
    """

    def __init__(self, shared: Shared, jobs: Jobs) -> None:
        self._shared = shared
        self._jobs = jobs

    async def generate(
        self, request: orchestrator_pb.GeneratePolicyRequest, timeout: float
    ) -> rollout_pb.GenerateResponse:
        """Generate a completion with the policy's newest version.

        Raises `NotFound` for an unknown job or policy, `Unavailable` while an active job's engines
        are being prepared.
        """
        record = await self._shared.store.get(request.job_id)
        call = rollout_pb.GenerateRequest(
            request_id=new_id("generate"),
            job_id=request.job_id,
            policy=record.policy_of(request.policy),
            messages=request.messages,
            input_ids=request.input_ids,
            sampling=request.sampling if request.HasField("sampling") else None,
        )

        return await self._call_serving_worker(
            record,
            call.policy,
            lambda worker: worker.rollout.Generate(call, timeout=timeout),
        )

    async def score(
        self, request: rollout_pb.ScoreRequest, timeout: float
    ) -> rollout_pb.ScoreResponse:
        """Compute log-probs of continuations under the policy's newest version. Raises like
        `generate`."""
        record = await self._shared.store.get(request.job_id)
        call = rollout_pb.ScoreRequest()
        call.CopyFrom(request)
        call.policy = record.policy_of(request.policy)
        return await self._call_serving_worker(
            record, call.policy, lambda worker: worker.rollout.Score(call, timeout=timeout)
        )

    async def _call_serving_worker(
        self, record: JobRecord, policy: str, call: Callable[[WorkerHandle], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Return the answer of a worker that serves the policy."""
        beat = None
        worker = self._serving(record.job_id, policy)
        if worker is not None:
            try:
                return await call(worker)
            except TroupeError as error:
                if error.kind != kinds.JOB_NOT_PREPARED:
                    raise
                # The worker has released the job since its last heartbeat.
                beat = worker.beat
        if record.state in _ACTIVE:
            raise Unavailable(
                f"the engines of job {record.job_id} are not ready: it is {record.state_name}",
                kind="engines_not_ready",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        async with self._jobs.lock(record.job_id):
            worker = self._serving(record.job_id, policy)
            if worker is None or worker.beat is beat:
                worker = await self._prepare(record)
        return await call(worker)

    def _serving(self, job_id: str, policy: str) -> WorkerHandle | None:
        """Return the least busy worker that serves the policy, as far as its heartbeat tells."""
        found = [
            (engine.running + engine.waiting, worker.worker_id, worker)
            for worker in self._shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
            for engine in worker.beat.engines
            if (engine.job_id, engine.policy) == (job_id, policy)
            and engine.state == common_pb.ENGINE_STATE_HEALTHY
        ]
        return min(found)[2] if found else None

    async def _prepare(self, record: JobRecord) -> WorkerHandle:
        """Publish the job's weights again and start its engines on one rollout worker."""
        shared = self._shared
        record = await shared.store.get(record.job_id)
        versions = await shared.weight_versions.newest(record.job_id, timeout=ASKED_SECONDS)
        spec = record.spec()
        if record.state in _ACTIVE or set(versions) != set(spec.policies) - set(spec.slots):
            raise FailedPrecondition(
                f"job {record.job_id} is {record.state_name} and has no weights to serve yet",
                kind="no_weights",
                field="job_id",
                value=record.job_id,
                remedy="Wait until it runs, or resume it.",
            )
        job = JobContext.of(shared, record, record.epoch)
        deadline = Deadline("preparing engines", _PREPARE_SECONDS, "generate")
        both = (orchestrator_pb.WORKER_KIND_ROLLOUT, orchestrator_pb.WORKER_KIND_TRAINER)
        await shared.workers.wait_for(both, deadline)
        await release_ended_jobs(shared, record.job_id)
        await shared.store.note_states(record.job_id)
        worker = shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)[0]
        trainers = Trainers(job, versions)
        try:
            weights = await trainers.bind_all(deadline)
            if spec.slots:
                weights |= await slot_weights(job, trainers, deadline)
            request = rollout_pb.PrepareJobRequest(
                request_id=new_id("prepare"),
                job_id=record.job_id,
                spec_json=job.spec_json,
                weights=weights.values(),
            )
            await worker.rollout.PrepareJob(request, timeout=deadline.left)
        finally:
            await trainers.release(shared.settings.cleanup_seconds)
            trainers.close()
            if spec.slots:
                # If the job was resumed, the members belong to its new runner.
                with suppress(Superseded):
                    await (await on_demand("slots")).unpublish_members(job)
        return worker


async def slot_weights(
    job: JobContext, trainers: Trainers, deadline: Deadline
) -> dict[str, common_pb.WeightsRef]:
    """Return the weights that the slots of a population served last."""
    found = await on_demand("population")
    population: PopulationRun = await found.PopulationRun.open(
        job, trainers, job.shared.populations
    )
    return await population.slots.refs(deadline)
