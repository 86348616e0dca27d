"""Generates with a policy of a job: on the engines that it has, or on ones made for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from services.orchestrator.context import JobContext, Shared
from services.orchestrator.faults import Patience
from services.orchestrator.job_store import Superseded
from services.orchestrator.jobs import Jobs
from services.orchestrator.populations import on_demand
from services.orchestrator.records import JobRecord
from services.orchestrator.room import make_room
from services.orchestrator.training import Trainers
from services.orchestrator.workers import Worker
from troupe.rpc import FailedPrecondition, NotFound, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro

if TYPE_CHECKING:  # most jobs have none
    from services.orchestrator.populations.population import Population

# Loading a finished job's policies and starting its engines.
_PREPARE_SECONDS: Final = 600.0
_RETRY_AFTER_MS: Final = 1000
AnswerT = TypeVar("AnswerT")
_ACTIVE: Final = frozenset(
    {pb.JOB_STATE_SUBMITTED, pb.JOB_STATE_STARTING, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSING}
)


async def slot_weights(
    job: JobContext, trainers: Trainers, patience: Patience
) -> dict[str, pb.WeightsRef]:
    """What the slots of a population served last."""
    found = await on_demand("population")
    population: Population = await found.Population.open(job, trainers, job.shared.populations)
    return await population.slots.refs(patience)


class Generation:
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

        async def ask(worker: Worker) -> ro.GenerateResponse:
            answer: ro.GenerateResponse = await worker.rollout.Generate(call, timeout=timeout)
            return answer

        return await self._asked(request.job_id, request.policy, ask)

    async def score(self, request: ro.ScoreRequest, timeout: float) -> ro.ScoreResponse:
        """Log-probs of continuations under the policy's newest version. Raises as `generate`."""

        async def ask(worker: Worker) -> ro.ScoreResponse:
            answer: ro.ScoreResponse = await worker.rollout.Score(request, timeout=timeout)
            return answer

        return await self._asked(request.job_id, request.policy, ask)

    async def _asked(
        self, job_id: str, policy: str, ask: Callable[[Worker], Awaitable[AnswerT]]
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

    def _serving(self, job_id: str, policy: str) -> Worker | None:
        """The least busy worker that serves the policy, as far as its heartbeat tells."""
        found = [
            (engine.running + engine.waiting, worker.worker_id, worker)
            for worker in self._shared.workers.usable(orch.WORKER_KIND_ROLLOUT)
            for engine in worker.beat.engines
            if (engine.job_id, engine.policy) == (job_id, policy)
            and engine.state == pb.ENGINE_STATE_HEALTHY
        ]
        return min(found)[2] if found else None

    async def _prepare(self, record: JobRecord) -> Worker:
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
        patience = Patience("preparing engines", _PREPARE_SECONDS, "generate")
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
