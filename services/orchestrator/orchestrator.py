"""The orchestrator without gRPC: its parts, wired once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import structlog

from services.orchestrator.cluster import ClusterView, make_room
from services.orchestrator.context import JobContext, Shared
from services.orchestrator.crash_loops import LaunchGuard, is_suspect, limit_of
from services.orchestrator.errors import Deadline
from services.orchestrator.functions import Catalogue, FunctionService
from services.orchestrator.jobs.manager import Jobs
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TrainerScheduler
from services.orchestrator.placement.workers import WorkerHandle, WorkerRegistry
from services.orchestrator.populations import on_demand
from services.orchestrator.populations.state import PopulationStore
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.job_store import JobStore, Superseded
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import RedisAccess
from services.orchestrator.state.trajectories import RecentTrajectories
from services.orchestrator.state.weight_versions import WeightVersions
from troupe.rpc import (
    NO_RETRY,
    FailedPrecondition,
    NotFound,
    RetryPolicy,
    TroupeError,
    Unavailable,
    connect,
    new_id,
)
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun

_log = structlog.get_logger(__name__)


async def recover(store: JobStore, jobs: Jobs, guard: LaunchGuard) -> list[str]:
    """Launch a runner for each unfinished job; returns their ids.

    A paused job waits for its user. One that was pausing or cancelling ends that first. One that
    ended the orchestrators before this one is set aside; those that may have are launched apart.
    """
    continued: list[str] = []
    suspects: list[str] = []
    for job_id in await store.ids():
        record = await store.get(job_id)
        if record.broken:
            assert record.problem is not None, "it says what is broken"
            _log.error("a job cannot be read", job_id=job_id, why=record.problem.message)
            continue
        if record.terminal or record.state == pb.JOB_STATE_PAUSED:
            continue
        deaths, limit = await guard.deaths(job_id), limit_of(record)
        if deaths >= limit and record.state != pb.JOB_STATE_CANCELLING:
            _log.error("a job is set aside", job_id=job_id, deaths=deaths)
            await jobs.set_aside(job_id, deaths)
            continue
        _log.info("job continues", job_id=job_id, state=record.state_name, step=record.step)
        (suspects if is_suspect(deaths, limit) else continued).append(job_id)
    for job_id in continued:
        await guard.begin(job_id)
        jobs.launch(job_id)
    jobs.launch_apart(suspects)
    return continued + suspects


# Loading a finished job's policies and starting its engines.
_PREPARE_SECONDS: Final = 600.0
_RETRY_AFTER_MS: Final = 1000
AnswerT = TypeVar("AnswerT")
_ACTIVE: Final = frozenset(
    {pb.JOB_STATE_SUBMITTED, pb.JOB_STATE_STARTING, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSING}
)


async def slot_weights(
    job: JobContext, trainers: Trainers, patience: Deadline
) -> dict[str, pb.WeightsRef]:
    """What the slots of a population served last."""
    found = await on_demand("population")
    population: PopulationRun = await found.Population.open(job, trainers, job.shared.populations)
    return await population.slots.refs(patience)


class GenerationService:
    """Serves trained policies between and after runs."""

    def __init__(self, shared: Shared, jobs: Jobs) -> None:
        self._shared = shared
        self._jobs = jobs

    async def generate(
        self, request: orch.GeneratePolicyRequest, timeout: float
    ) -> ro.GenerateResponse:
        """Generate with the policy's newest version.

        Raises `NotFound` for an unknown job or policy, `Unavailable` while an active job's engines
        are being prepared.
        """
        call = ro.GenerateRequest(
            request_id=new_id("generate"),
            job_id=request.job_id,
            policy=request.policy,
            messages=request.messages,
            input_ids=request.input_ids,
            sampling=request.sampling if request.HasField("sampling") else None,
        )

        async def ask(worker: WorkerHandle) -> ro.GenerateResponse:
            answer: ro.GenerateResponse = await worker.rollout.Generate(call, timeout=timeout)
            return answer

        return await self._asked(request.job_id, request.policy, ask)

    async def score(self, request: ro.ScoreRequest, timeout: float) -> ro.ScoreResponse:
        """Log-probs of continuations under the policy's newest version. Raises as `generate`."""

        async def ask(worker: WorkerHandle) -> ro.ScoreResponse:
            answer: ro.ScoreResponse = await worker.rollout.Score(request, timeout=timeout)
            return answer

        return await self._asked(request.job_id, request.policy, ask)

    async def _asked(
        self, job_id: str, policy: str, ask: Callable[[WorkerHandle], Awaitable[AnswerT]]
    ) -> AnswerT:
        """What a worker answers that serves the policy."""
        record = await self._shared.store.get(job_id)
        spec = record.spec()
        if policy not in spec.policies:
            raise NotFound(
                f"job {record.job_id} has no policy {policy!r}",
                field="policy",
                value=policy,
                remedy=f"Its policies: {', '.join(sorted(spec.policies))}.",
            )
        beat = None
        worker = self._serving(job_id, policy)
        if worker is not None:
            try:
                return await ask(worker)
            except TroupeError as error:
                if error.kind != "job_not_prepared":
                    raise
                # It has let the job go since it last reported.
                beat = worker.beat
        if record.state in _ACTIVE:
            raise Unavailable(
                f"the engines of job {record.job_id} are not ready: it is {record.state_name}",
                kind="engines_not_ready",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        async with self._jobs.lock(record.job_id):
            worker = self._serving(job_id, policy)
            if worker is None or worker.beat is beat:
                worker = await self._prepare(record)
        return await ask(worker)

    def _serving(self, job_id: str, policy: str) -> WorkerHandle | None:
        """The least busy worker that serves the policy, as far as its heartbeat tells."""
        found = [
            (engine.running + engine.waiting, worker.worker_id, worker)
            for worker in self._shared.workers.usable(orch.WORKER_KIND_ROLLOUT)
            for engine in worker.beat.engines
            if (engine.job_id, engine.policy) == (job_id, policy)
            and engine.state == pb.ENGINE_STATE_HEALTHY
        ]
        return min(found)[2] if found else None

    async def _prepare(self, record: JobRecord) -> WorkerHandle:
        """Publish the job's weights again and start its engines on one rollout worker."""
        shared = self._shared
        record = await shared.store.get(record.job_id)
        entries = await shared.ledger.entries(record.job_id)
        spec = record.spec()
        if record.state in _ACTIVE or set(entries) != set(spec.policies) - set(spec.slots):
            raise FailedPrecondition(
                f"job {record.job_id} is {record.state_name} and has no weights to serve yet",
                kind="no_weights",
                field="job_id",
                value=record.job_id,
                remedy="Wait until it runs, or resume it.",
            )
        job = JobContext(
            shared, record.job_id, record.epoch, spec, record.spec_json, record.directory
        )
        patience = Deadline("preparing engines", _PREPARE_SECONDS, "generate")
        both = (orch.WORKER_KIND_ROLLOUT, orch.WORKER_KIND_TRAINER)
        await shared.workers.wait_for(both, patience)
        await make_room(shared, record.job_id)
        await shared.store.note_states(record.job_id)
        worker = shared.workers.usable(orch.WORKER_KIND_ROLLOUT)[0]
        trainers = Trainers(job, entries)
        try:
            weights = await trainers.bind_all(patience)
            if spec.slots:
                weights |= await slot_weights(job, trainers, patience)
            request = ro.PrepareJobRequest(
                request_id=new_id("prepare"),
                job_id=record.job_id,
                spec_json=record.spec_json,
                weights=weights.values(),
            )
            await worker.rollout.PrepareJob(request, timeout=patience.left)
        finally:
            await trainers.release(shared.settings.cleanup_seconds)
            trainers.close()
            if spec.slots:
                # Resumed elsewhere: they are another runner's now.
                with suppress(Superseded):
                    await (await on_demand("pool")).let_go(job)
        return worker


# A job rather waits for its experience store than fails; what bounds a job's waits are its limits.
_PATIENT: Final = RetryPolicy(max_attempts=100_000)
_PATIENT_SECONDS: Final = 7200.0


class Orchestrator:
    """Jobs, their durable state, the workers, and the picture of it all."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._redis = RedisAccess(settings.redis_url, disk=settings.data_dir)
        log = EventLog(self._redis)
        patient = settings.client(retry=_PATIENT).model_copy(
            update={"deadline_seconds": _PATIENT_SECONDS}
        )
        self._experience = connect(settings.experience_store_address, patient)
        hasty = settings.client(retry=NO_RETRY)
        probed = {
            "experience_store": settings.experience_store_address,
            "reward": settings.reward_address,
        }
        self._probes: dict[str, tuple[str, grpc.aio.Channel]] = {
            name: (address, connect(address, hasty)) for name, address in probed.items()
        }
        self._reward = connect(settings.reward_address, hasty)
        workers = WorkerRegistry(settings)
        store = JobStore(self._redis, log, data_dir=settings.data_dir.absolute())
        self.shared = Shared(
            settings=settings,
            store=store,
            ledger=WeightVersions(self._redis),
            log=log,
            trajectories=RecentTrajectories(self._redis, settings.recent_trajectories),
            populations=PopulationStore(self._redis, store),
            workers=workers,
            binder=TrainerScheduler(workers),
            experience=ExperienceStoreStub(self._experience),
            reward=RewardStub(self._reward),
            in_flight={},
        )
        self.functions = FunctionService(Catalogue(self._redis), self.shared.reward)
        self._guard = LaunchGuard(self._redis, settings.survival_seconds)
        self.jobs = Jobs(self.shared, self._guard, self.functions.check_job)
        self.generation = GenerationService(self.shared, self.jobs)
        self.cluster = ClusterView(
            self.shared.workers,
            self.shared.binder,
            self.shared.store,
            self._probes,
            settings.probe_seconds,
        )

    async def start(self) -> None:
        """Wait for Redis, then continue every job that had not ended."""
        await self._redis.ping()
        self.shared.workers.start()
        self.shared.binder.start()
        self.functions.start()
        await recover(self.shared.store, self.jobs, self._guard)

    async def stop(self) -> None:
        """Stop running jobs; what they are is in Redis and in the experience store."""
        await self.jobs.stop()
        await self._guard.close()
        await self.functions.stop()
        await self.shared.binder.close()
        await self.shared.workers.close()
        probes = (channel for _, channel in self._probes.values())
        for channel in (self._experience, self._reward, *probes):
            await channel.close(None)
        await self._redis.close()
