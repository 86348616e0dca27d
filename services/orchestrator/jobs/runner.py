"""The runner of one job: binds its policies, prepares its engines, and runs steps until it ends or
pauses.

All durable state is in Redis and in the experience store, so another runner can replace one that
dies and continue from there. `progress.JobProgress` runs the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from services.orchestrator.cluster import (
    delete_states,
    ended_holders,
    free_tables,
    release_ended_jobs,
)
from services.orchestrator.context import JobContext, Shared
from services.orchestrator.errors import (
    Deadline,
    cancel_all,
    cancelled_from_outside,
    run_all,
    run_with_background,
)
from services.orchestrator.jobs.checkpoints import mark_best
from services.orchestrator.jobs.origins import fetch_origins
from services.orchestrator.jobs.progress import JobProgress
from services.orchestrator.jobs.sinks import Sinks, make_directory
from services.orchestrator.pipeline.dispatch import Dispatch
from services.orchestrator.pipeline.split_watch import SplitWatch
from services.orchestrator.pipeline.steps import StepContext
from services.orchestrator.placement.automatic import settled
from services.orchestrator.placement.device_turns import DeviceTurns, bind_alone
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.populations import on_demand
from services.orchestrator.state.job_store import Superseded
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import NO_STATE
from troupe.contracts import kinds
from troupe.job.compatibility import advice
from troupe.outcomes import described
from troupe.rpc import FailedPrecondition, Internal, TroupeError, new_id
from troupe.twin.profile import JobProfile
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Interval at which a runner checks whether another one has taken the job over.
_EPOCH_SECONDS: Final = 1.0
_BOTH: Final = (orchestrator_pb.WORKER_KIND_TRAINER, orchestrator_pb.WORKER_KIND_ROLLOUT)


class _PauseRequested(Exception):
    """A pause of the job was requested."""


class JobRunner:
    """The runner of a job from its current state. A newer runner of the job fences off an older
    one."""

    def __init__(self, shared: Shared, job_id: str) -> None:
        self._shared = shared
        self._job_id = job_id
        self._pause = asyncio.Event()
        self._cancel = False
        # Whether an earlier runner had started its engines and trainers.
        self._was_up = False
        self._body: asyncio.Task[None] | None = None
        self._epoch: int
        self._job: JobContext
        self._record: JobRecord
        self._sinks: Sinks | None = None
        # Metrics logged before this runner started.
        self._past: list[orchestrator_pb.MetricsLogged] = []
        self._tables: TableWatch
        self._trainers: Trainers | None = None
        self._engines: Engines | None = None
        self._turns: DeviceTurns | None = None
        self._progress: JobProgress | None = None
        self._population: PopulationRun | None = None

    @property
    def colocates(self) -> bool:
        """Whether the job's engines and trainers take turns on the same devices."""
        return hasattr(self, "_job") and bool(self._job.spec.colocated)

    def pause(self) -> None:
        """Stop after the open steps. The job's state is already PAUSING."""
        self._pause.set()
        if self._progress is not None:
            self._progress.close()

    def cancel(self) -> None:
        """Stop now. The job's state is already CANCELLING."""
        self._cancel = True
        if self._body is not None:
            self._body.cancel()

    async def run(self) -> None:
        """Run until the job is paused or has ended.

        Cancellation leaves the job unchanged, for another runner to continue. So do the errors it
        raises: `Superseded` (another orchestrator has the job) and those in `NO_STATE` (Redis is
        away or full, so nothing can be recorded).
        """
        try:
            await self._adopt()
            await self._run_body()
        except asyncio.CancelledError:
            if not self._cancel or cancelled_from_outside():
                raise
        except (Superseded, *NO_STATE):
            raise
        except TroupeError as error:
            await self._end_failed(error)
        except (Exception, SystemExit, KeyboardInterrupt, BaseExceptionGroup) as error:
            _log.exception("a fault of the orchestrator", job_id=self._job_id)
            await self._end_failed(Internal(described(error)))
        finally:
            self._shared.deaths.end(self._job_id, blamed=False)
            if self._population is not None:
                await self._population.close()
            if self._trainers is not None:
                self._trainers.close()
            if self._sinks is not None:
                for trouble in await self._sinks.close():
                    with suppress(TroupeError):
                        await self._job.warn(trouble)
        if self._cancel:
            await self._end(common_pb.JOB_STATE_CANCELLED, "cancelling: giving workers back")

    async def _adopt(self) -> None:
        """Take the job over from the previous runner."""
        structlog.contextvars.bind_contextvars(job_id=self._job_id)
        self._epoch = epoch = await self._shared.store.adopt(self._job_id)
        await self._shared.store.forget_resolved(self._job_id)
        self._record = record = await self._shared.store.get(self._job_id)
        self._cancel = self._cancel or record.state == common_pb.JOB_STATE_CANCELLING
        self._job = JobContext.of(self._shared, record, epoch)
        self._was_up = record.state == common_pb.JOB_STATE_RUNNING or record.step > 0
        if record.state == common_pb.JOB_STATE_PAUSING:
            # The orchestrator died while the step finished. A resume continues with the step.
            self._pause.set()

    async def _run_body(self) -> None:
        """Run the job in a task that `cancel` can end."""
        self._body = asyncio.create_task(self._run_to_end())
        if self._cancel:
            self._body.cancel()
        try:
            await self._body
        finally:
            await cancel_all([self._body])

    async def _run_to_end(self) -> None:
        """Run the job until it has succeeded, or is paused."""
        try:
            trainers, progress = await self._run_all_steps()
        except _PauseRequested:
            return await self._end(common_pb.JOB_STATE_PAUSED, "pausing: giving workers back")
        # Engines stay up until another job needs the memory, so that users can generate.
        await self._unpublish_members()
        await trainers.release(self._shared.settings.cleanup_seconds)
        shortfall = await progress.shortfall()
        if shortfall is not None:
            await self._job.error(str(shortfall))
        problem = None if shortfall is None else shortfall.to_problem()
        await self._move(common_pb.JOB_STATE_SUCCEEDED, problem)
        if self._job.spec.pipeline.max_uses > 1:
            await free_tables(self._shared, self._job_id)
        return self._shared.log.forget(self._job_id)

    async def _run_all_steps(self) -> tuple[Trainers, JobProgress]:
        """Start trainers and engines, and run all steps. Raises `_PauseRequested`."""
        await self._unless_paused(self._wait_in_line())
        trainers = await self._unless_paused(self._bind())
        assert self._sinks is not None, "opened by _bind"
        weights = {name: one.weights for name, one in trainers.policies.items()}
        self._population = await self._unless_paused(self._open_population(trainers))
        weights |= await self._unless_paused(self._slots())
        self._engines = engines = Engines(self._job, weights, self._republish)
        self._turns = DeviceTurns(self._job, trainers, engines)
        profile = await self._profile()
        context = StepContext(
            job=self._job,
            trainers=trainers,
            engines=engines,
            dispatch=Dispatch(self._job, engines),
            tables=self._tables,
            turns=self._turns,
            population=self._population,
            profile=profile,
            split=SplitWatch(self._job, engines, profile),
        )
        if self._population is not None:
            self._population.attach(context.dispatch, engines)
        self._progress = progress = JobProgress(context, self._record, self._sinks, self._past)
        background = run_all(
            engines.run(),
            context.dispatch.run(),
            context.tables.run(),
            self._watch_epoch(),
            progress.watch_clock(),
        )
        await run_with_background(self._run_steps(progress, engines), background)
        return trainers, progress

    async def _wait_in_line(self) -> None:
        """Wait until the job may run in addition to the others."""
        job, record = self._job, self._record

        def report(before: int) -> None:
            most = self._shared.settings.max_running_jobs
            job.show(
                f"waiting in the queue of jobs, at place {before + 1}, priority "
                f"{job.spec.priority}; at most {most} run (TROUPE_MAX_RUNNING_JOBS)"
            )

        queue = self._shared.queue
        if record.state != common_pb.JOB_STATE_SUBMITTED:
            queue.keep(self._job_id)
        await queue.enter(self._job_id, job.spec.priority, record.created_at, report)

    async def _profile(self) -> JobProfile:
        """Return the profile that earlier runners of the job measured, or an empty one."""
        found = await self._shared.store.profile(self._job_id)
        empty = JobProfile.of_spec(self._job.spec)
        # A job resumed with other settings is measured anew.
        return empty if found is None or not found.of_same(empty) else found

    async def _bind(self) -> Trainers:
        """Wait for workers, create the tables, and bind every policy at its committed version."""
        job, shared = self._job, self._shared
        if self._record.state == common_pb.JOB_STATE_SUBMITTED:
            for line in advice(job.spec):
                await job.warn(line)
        await self._move(common_pb.JOB_STATE_STARTING)
        await make_directory(job.directory, self._record.spec())
        await asyncio.to_thread(mark_best, job.directory, job.spec.stop)
        await fetch_origins(job, self._record.origins)
        self._sinks = Sinks(job.spec, self._job_id, job.directory)
        self._past = await shared.store.metrics(self._job_id)
        for trouble in await self._sinks.open(self._past):
            await job.warn(trouble)
        await shared.workers.wait_for(_BOTH, self._settings_deadline("workers"))
        # Engines of a job that had succeeded may still be up, under its earlier specification.
        anew = self._record.state == common_pb.JOB_STATE_SUBMITTED
        ended = await ended_holders(shared)
        await release_ended_jobs(shared, self._job_id, self_too=anew)
        job = self._job = await settled(job, self._record, ended)
        job.show("declaring tables")
        tables = store_pb.CreateTablesRequest(
            request_id=new_id("tables"),
            job_id=self._job_id,
            policies=job.spec.trained_policies,
            required_columns=job.spec.pipeline.required_columns,
            max_uses=job.spec.pipeline.max_uses,
            drop_without_signal=job.spec.pipeline.dynamic_sampling,
        )
        # First of all: a store that has lost the job's data must not get new tables.
        versions = await shared.weight_versions.load(self._record, self._epoch)
        await shared.experience.CreateTables(tables)
        await shared.store.note_states(self._job_id)
        self._tables = TableWatch(shared.experience, self._job_id, shared.trainer_scheduler.touch)
        self._trainers = Trainers(job, versions, self._tables)
        await bind_alone(
            job,
            self._trainers,
            self._settings_deadline("bind"),
            leftovers=self._record.state != common_pb.JOB_STATE_SUBMITTED,
        )
        return self._trainers

    async def _open_population(self, trainers: Trainers) -> PopulationRun | None:
        if self._job.spec.population is None:
            return None
        found = await on_demand("population")
        population: PopulationRun = await found.PopulationRun.open(
            self._job, trainers, self._shared.populations
        )
        return population

    async def _slots(self) -> dict[str, common_pb.WeightsRef]:
        """Return the weights of the population's slots."""
        if self._population is None:
            return {}
        return await self._population.slots.refs(self._settings_deadline("bind"))

    async def _republish(self, policy: str) -> None:
        """Publish a policy's weights again, since no host has them anymore."""
        if policy in self._job.spec.slots:
            assert self._population is not None, "it made the slots"
            await self._population.slots.republish(policy)
        else:
            assert self._turns is not None, "made before engines load"
            await self._turns.republish(policy)

    async def _watch_epoch(self) -> None:
        """Raise `Superseded` within seconds of another runner taking the job, rather than at the
        next write."""
        while True:
            await asyncio.sleep(_EPOCH_SECONDS)
            with suppress(*NO_STATE):  # the next write raises it
                await self._shared.store.check_epoch(self._job_id, self._epoch)

    async def _run_steps(self, progress: JobProgress, engines: Engines) -> None:
        """Prepare engines, then run all steps. Raises `_PauseRequested`."""
        await self._unless_paused(self._prepare(engines))
        progress.clock.start()
        while not progress.finished:
            await self._unless_paused(progress.catch_up())
            await progress.advance()
            if self._pause.is_set() and not progress.finished:
                raise _PauseRequested
        await self._unless_paused(progress.catch_up())

    async def _prepare(self, engines: Engines) -> None:
        deadline = self._startup_deadline(
            "preparing engines",
            engines.prepare_seconds,
            "policies.*.engine.start_timeout_seconds",
        )
        await engines.wait_ready(deadline)
        await self._move(common_pb.JOB_STATE_RUNNING)

    async def _end(self, target: common_pb.JobState.ValueType, doing: str) -> None:
        """Have all workers that answer release the job, then move it to the state `target`."""
        if hasattr(self, "_job"):  # else its specification could not be read
            self._job.show(doing, step=self._record.step)
        await self._release()
        self._shared.deaths.end(self._job_id, blamed=target == common_pb.JOB_STATE_CANCELLED)
        await self._move(target)
        self._shared.log.forget(self._job_id)

    async def _end_failed(self, error: TroupeError) -> None:
        if self._cancel or await self._state() == common_pb.JOB_STATE_CANCELLING:
            self._cancel = True
            return
        _log.error("job failed", job_id=self._job_id, error=str(error), kind=error.kind)
        await self._release()
        self._shared.deaths.end(self._job_id, blamed=error.kind == kinds.WORKERS_KEEP_DYING)
        try:
            await self._move(common_pb.JOB_STATE_FAILED, error.to_problem())
        except FailedPrecondition:
            # It was cancelled meanwhile, so it ends as cancelled.
            if await self._state() != common_pb.JOB_STATE_CANCELLING:
                raise
            self._cancel = True
            return
        self._shared.log.forget(self._job_id)

    async def _release(self) -> None:
        seconds = self._shared.settings.cleanup_seconds
        if self._engines is None:
            # The previous runner died, so only the workers know what it held.
            await release_ended_jobs(self._shared, self._job_id, self_too=True)
        else:
            await self._engines.release(seconds)
        await self._unpublish_members()
        if self._trainers is not None:
            await self._trainers.release(seconds)
        if self._job_id in await self._shared.store.with_states():
            await delete_states(self._shared, self._job_id)

    async def _unpublish_members(self) -> None:
        """Unpublish members of a population, which only the job's engines need."""
        if hasattr(self, "_job") and self._job.spec.population is not None:
            if self._population is not None:
                await self._population.close()
            try:
                await (await on_demand("slots")).unpublish_members(self._job)
            except (Superseded, *NO_STATE):
                raise
            except Exception as error:
                # Members that stay published cost memory; a job that never ends would cost more.
                _log.warning("members not unpublished", job_id=self._job_id, error=str(error))

    async def _unless_paused(self, part: Coroutine[Any, Any, T]) -> T:
        """Return the result of `part`. Raises `_PauseRequested` if a pause is requested before or
        during it."""
        task = asyncio.create_task(part)
        asked = asyncio.create_task(self._pause.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._pause.is_set() or not task.done():
                raise _PauseRequested
            return task.result()
        except FailedPrecondition as error:
            # The job's state became PAUSING just before `part` moved it.
            refused = error.kind == kinds.ILLEGAL_TRANSITION
            if refused and await self._state() == common_pb.JOB_STATE_PAUSING:
                raise _PauseRequested from error
            raise
        finally:
            await cancel_all((task, asked))

    async def _state(self) -> common_pb.JobState.ValueType:
        return (await self._shared.store.get(self._job_id)).state

    async def _move(
        self, target: common_pb.JobState.ValueType, problem: common_pb.Problem | None = None
    ) -> None:
        await self._shared.store.move(self._job_id, target, epoch=self._epoch, problem=problem)

    def _settings_deadline(self, what: str) -> Deadline:
        field = f"{what}_timeout_seconds"
        names = {"workers": "waiting for workers", "bind": "binding policies"}
        seconds: float = getattr(self._shared.settings, field)
        return self._startup_deadline(names[what], seconds, f"TROUPE_{field.upper()}")

    def _startup_deadline(self, what: str, seconds: float, field: str) -> Deadline:
        """Return the deadline of a part of the start. A job that ran before may take as long to
        restart as one of its steps."""
        limit = self._job.spec.limits.step_seconds
        if self._was_up and limit > seconds:
            seconds, field = limit, "limits.step_seconds"
        return Deadline(what, seconds, field, self._job.show)
