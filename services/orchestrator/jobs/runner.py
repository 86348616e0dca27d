"""The runner of one job: binds its policies, prepares its engines, and runs steps until it ends or
pauses.

All durable state is in Redis and in the experience store, so another runner can replace one that
dies and continue from there. `JobRunner` handles the job's life cycle, `JobProgress` its steps,
evaluations and checkpoints. The manifest lists the checkpoints that belong together.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from services.orchestrator.cluster import delete_states, free_tables, release_ended_jobs
from services.orchestrator.context import JobContext, Shared
from services.orchestrator.errors import (
    Deadline,
    cancel_all,
    cancelled_from_outside,
    run_all,
    run_with_background,
)
from services.orchestrator.functions import mean_seconds
from services.orchestrator.jobs.checkpoints import best_value, keep_best
from services.orchestrator.jobs.sinks import Sinks, make_directory
from services.orchestrator.pipeline.dispatch import Dispatch
from services.orchestrator.pipeline.evaluation import EvaluationRunner
from services.orchestrator.pipeline.metrics import JobTotals
from services.orchestrator.pipeline.split_watch import SplitWatch
from services.orchestrator.pipeline.steps import StepContext, StepWindow
from services.orchestrator.placement.device_turns import DeviceTurns, bind_alone
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.populations import on_demand
from services.orchestrator.state.job_store import Superseded
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import NO_STATE
from troupe.contracts import kinds
from troupe.disks import replace_file
from troupe.job import JobSpec
from troupe.job.compatibility import advice
from troupe.job.spec import evaluation_prefix
from troupe.outcomes import described
from troupe.rpc import FailedPrecondition, Internal, TroupeError, new_id
from troupe.twin.hints import split_hint
from troupe.twin.profile import JobProfile
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Interval at which a runner checks whether another one has taken the job over.
_EPOCH_SECONDS: Final = 1.0
# Seconds between reports of a checkpoint's progress.
_PROGRESS_SECONDS: Final = 1.0
_BOTH: Final = (orchestrator_pb.WORKER_KIND_TRAINER, orchestrator_pb.WORKER_KIND_ROLLOUT)
_MANIFEST_NAME: Final = re.compile(r"manifest-step([0-9]+)\.json")


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
        self._job = JobContext(
            shared=self._shared,
            job_id=self._job_id,
            epoch=epoch,
            spec=record.spec(),
            spec_json=record.spec_json,
            directory=record.directory,
        )
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
            engines.run(), context.dispatch.run(), context.tables.run(), self._watch_epoch()
        )
        await run_with_background(self._run_steps(progress, engines), background)
        return trainers, progress

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
        await make_directory(job.directory, job.spec)
        self._sinks = Sinks(job.spec, self._job_id, job.directory)
        self._past = await shared.store.metrics(self._job_id)
        for trouble in await self._sinks.open(self._past):
            await job.warn(trouble)
        await shared.workers.wait_for(_BOTH, self._settings_deadline("workers"))
        await release_ended_jobs(shared, self._job_id)
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


class JobProgress:
    """Steps, evaluations and checkpoints of a job with bound policies and ready engines."""

    def __init__(
        self,
        context: StepContext,
        record: JobRecord,
        sinks: Sinks,
        past: Iterable[orchestrator_pb.MetricsLogged] = (),
    ) -> None:
        """`past`: metrics logged before this runner started."""
        self._context = context
        self._job = context.job
        self._record = record
        self._sinks = sinks
        self._population = context.population
        self._totals = JobTotals(self._job.spec, past)
        self._window = StepWindow(context, record.step, self._finish)
        # Evaluations that are due and run concurrently with the next steps.
        self._beside: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or a population is complete (`population.stop`)."""
        complete = self._population is not None and self._population.stopped
        return complete or self._record.step >= self._job.spec.pipeline.steps

    async def advance(self) -> None:
        """Run the steps before the next evaluation or checkpoint; after `close`, only the open
        ones."""
        if self.finished:
            return
        steps = run_all(self._evaluate_beside(), self._window.run(self._next_due()))
        if self._population is None:
            await steps
        else:
            await run_with_background(steps, self._population.watch())

    async def _evaluate_beside(self) -> None:
        """Run the evaluations that `catch_up` left, concurrently with the next steps' rollouts."""
        if due := self._beside:
            with self._context.hold.during(len(due)):
                self._beside = ()
                await self._evaluate(due)

    def close(self) -> None:
        """Stop opening steps."""
        self._window.close()

    async def _finish(self, step: int, values: dict[str, float]) -> None:
        if self._population is not None:
            values |= self._population.metrics()
        self._totals.add(values)
        values |= self._totals.metrics()
        store = self._job.shared.store
        await store.finish_step(self._job.job_id, self._job.epoch, step, values)
        profile = self._context.profile
        profile.end_step(values)
        profile.device_classes = self._context.engines.device_classes
        profile.tools |= await mean_seconds(self._job.shared.reward, self._job.job_id)
        await store.keep_profile(self._job.job_id, profile)
        await self._hint(values)
        self._record = replace(self._record, step=step + 1)
        await self._write_to_sinks(orchestrator_pb.MetricsLogged(step=step + 1, values=values))

    async def _hint(self, values: Mapping[str, float]) -> None:
        """Tell the user once about each change that would shorten the steps."""
        if not (hint := split_hint(values)):
            return
        change = hint.partition(": ")[2].partition(" would")[0]
        self._job.complaints[change] += 1
        if self._job.complaints[change] == 1:
            await self._job.info(hint)

    async def shortfall(self) -> TroupeError | None:
        """Return why the finished job has not learned anything; None if it has.

        Warns about individual policies for which no step had a signal.
        """
        found = self._totals.shortfall()
        if found is None and (silent := self._totals.silent):
            steps = self._record.step
            await self._job.warn(f"0 of {steps} steps had a signal for {', '.join(silent)}")
        return found

    def _next_due(self) -> int:
        """Return the step count at which an evaluation or checkpoints are due next, or the last
        step count."""
        spec, step = self._job.spec, self._record.step
        evaluations = [one.every for one in spec.evaluation_sets.values()]
        every = [one for one in (spec.checkpoint.every, *evaluations) if one > 0]
        due = [(step // one + 1) * one for one in every]
        if self._population is not None:
            due.append(self._population.next_due(step))
        return min([spec.pipeline.steps, *due])

    async def catch_up(self) -> None:
        """Write the checkpoints and run the evaluation that are due after this step. In mode
        `async`, `advance` runs evaluations, except the last one.

        Raises the error of the last checkpoint if it could not be written, since the training
        result would be lost. A resumed job tries again.
        """
        spec, step = self._job.spec, self._record.step
        if self._population is not None:
            began = self._record.started_at or self._record.created_at
            await self._population.catch_up(
                step, finished=self.finished, seconds=time.time() - began
            )
        # Checkpoints first, so that a failing evaluation does not cost one.
        if step > 0 and self._due(spec.checkpoint.every) and self._record.checkpointed != step:
            await self._checkpoint()
        due = [
            name for name, one in spec.evaluation_sets.items() if step == 0 or self._due(one.every)
        ]
        if due and self._record.evaluated != step:
            if spec.pipeline.mode == "async" and not self.finished:
                # Trainers will have continued by the time the evaluation tells whether these
                # weights are the best.
                if spec.checkpoint.best and step > 0 and self._record.checkpointed != step:
                    await self._checkpoint()
                self._beside = tuple(due)
            else:
                await self._evaluate(due)
        if self.finished and (problem := self._record.checkpoint_problem) is not None:
            raise TroupeError.from_problem(problem)

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self._record.step % every == 0)

    async def _evaluate(self, names: Iterable[str]) -> None:
        step = self._record.step
        values: dict[str, float] = {}
        scores: dict[str, float] = {}
        newest = await self._job.shared.weight_versions.newest(self._job.job_id)
        versions = {policy: float(one.weights.version) for policy, one in newest.items()}
        for one in names:
            items = self._context.engines.evaluation_items.get(one)
            runner = EvaluationRunner(self._job, self._context.dispatch, step, one, items)
            found, compared = await runner.run()
            # The evaluated versions, since scores are compared over versions.
            prefix = evaluation_prefix(one)
            values |= found | {f"{prefix}version/{p}": version for p, version in versions.items()}
            scores |= compared
        await self._keep_best(values, versions)
        record = self._record
        name = "before" if record.step == 0 else "after" if self.finished else None
        fields = {} if name is None else {name: json.dumps(scores)}
        await self._job.shared.store.log_evaluation(
            record.job_id, self._job.epoch, record.evaluated, record.step, values, fields
        )
        self._record = replace(record, evaluated=record.step)
        await self._write_to_sinks(orchestrator_pb.MetricsLogged(step=record.step, values=values))

    async def _keep_best(self, values: Mapping[str, float], versions: Mapping[str, float]) -> None:
        """Keep the checkpoint of this step if it evaluated better than all before it.

        `versions`: evaluated versions by policy.
        """
        job, step, best = self._job, self._record.step, self._job.spec.checkpoint.best
        if best is None or step == 0:
            return
        value = values.get(best.metric)
        if value is None:
            same = [one for one in values if one.split("/")[:-1] == best.metric.split("/")[:-1]]
            if same:
                await job.warn(
                    f"checkpoint.best.metric: this evaluation has no `{best.metric}`; it has "
                    + ", ".join(sorted(same))
                )
            return
        known = await asyncio.to_thread(best_value, job.directory, best.metric)
        if known is not None and (value <= known if best.mode == "max" else value >= known):
            return
        if self._record.checkpointed != step:
            await self._checkpoint()
        try:
            kept = await asyncio.to_thread(
                keep_best, job.directory, step, versions, best.metric, value
            )
        except OSError as error:
            await job.error(f"the best checkpoint, after step {step}, could not be kept: {error}")
            return
        if not kept:
            await job.warn(
                f"the evaluation after step {step} was repeated with newer weights than the "
                "checkpoint after that step, so it does not count for the best checkpoint"
            )
        else:
            await job.info(
                f"the checkpoint after step {step} is the best: {best.metric} = {value:g}"
            )

    async def _checkpoint(self) -> None:
        """Save every trained policy. A failure is logged and recorded; `catch_up` raises it only
        after the last step."""
        job, step = self._job, self._record.step
        job.show(f"saving checkpoints after step {step}", step=step)
        policies = job.spec.trained_policies
        seconds = job.spec.limits.step_seconds
        deadline = Deadline("saving checkpoints", seconds, "limits.step_seconds", job.show)
        async with self._context.turns.of_trainers(deadline):
            results = await self._save(policies)
        problem: common_pb.Problem | None = None
        saved: dict[str, trainer_pb.SaveCheckpointResponse] = {}
        for policy, result in zip(policies, results, strict=True):
            what = f"checkpoint of {policy} after step {step}"
            if isinstance(result, TroupeError):
                problem = result.to_problem()
                problem.message = f"no {what}: {result.message}"
                await job.error(f"no {what}: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                saved[policy] = result
                await job.info(f"{what}: {result.path}")
        if len(saved) == len(policies):
            await self._write_manifest(saved)
        await job.shared.store.note_checkpoint(job.job_id, job.epoch, step, problem)
        self._record = replace(self._record, checkpointed=step, checkpoint_problem=problem)

    async def _save(self, policies: Sequence[str]) -> Sequence[Any]:
        """Return the checkpoints or errors of the policies, and show their progress meanwhile."""
        job, step = self._job, self._record.step
        trainers = [self._context.trainers.policies[policy] for policy in policies]
        tasks = [asyncio.create_task(one.save_checkpoint()) for one in trainers]
        try:
            while (await asyncio.wait(tasks, timeout=_PROGRESS_SECONDS))[1]:
                written, total = map(
                    sum, zip(*(one.checkpoint_progress for one in trainers), strict=True)
                )
                text = f"saving checkpoints after step {step}"
                job.show(text, step=step, done=written, total=total)
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()

    async def _write_manifest(self, saved: Mapping[str, trainer_pb.SaveCheckpointResponse]) -> None:
        """Write the manifest. No step is open, so versions do not move meanwhile."""
        job, step = self._job, self._record.step
        request = store_pb.GetStepRequest(job_id=job.job_id, step=step - 1, counts_only=True)
        last = await job.shared.experience.GetStep(request)
        newest = await job.shared.weight_versions.newest(job.job_id)
        weights = {policy: newest[policy].weights for policy in saved}
        content = manifest(job.spec, job.directory, step, last, weights, saved)
        try:
            await asyncio.to_thread(
                write_manifest, job.directory, content, job.spec.checkpoint.keep
            )
        except OSError as error:
            await job.error(f"no manifest of the checkpoints after step {step}: {error.strerror}")

    async def _write_to_sinks(self, row: orchestrator_pb.MetricsLogged) -> None:
        for trouble in await self._sinks.write(row):
            await self._job.warn(f"metrics not copied: {trouble}")


def manifest(
    spec: JobSpec,
    directory: Path,
    step: int,
    last: store_pb.GetStepResponse,
    weights: Mapping[str, common_pb.WeightsRef],
    saved: Mapping[str, trainer_pb.SaveCheckpointResponse],
) -> dict[str, Any]:
    """Return the manifest of the checkpoints after `step` steps, as JSON.

    Paths are relative to the job's `directory`, which may be moved. `last` is the newest step as
    the store has it, `weights` the newest committed ones, `saved` the checkpoint of every trained
    policy. The same arguments give the same bytes.
    """
    commits = {commit.policy: commit for commit in last.commits}
    return {
        "step": step,
        "spec_hash": spec_hash(spec),
        # The seed and a query's index determine all randomness of rollout.
        "seed": spec.seed,
        # First item of the training split not taken by any step.
        "cursor": last.cursor,
        "policies": {
            policy: {
                "version": weights[policy].version,
                "checksum": weights[policy].checksum,
                "path": _relative_to(directory, saved[policy].path),
                "frontier": _frontier(commits[policy]),
            }
            for policy in sorted(saved)
        },
    }


def _relative_to(directory: Path, path: str) -> str:
    """Return the path, relative to the directory if it is inside."""
    with suppress(ValueError):
        return str(Path(path).relative_to(directory))
    return path


def _frontier(commit: store_pb.StepCommit) -> dict[str, Any]:
    """Return the store's counts of trained samples up to a policy's commit."""
    digest = f"{commit.samples_digest:016x}" if commit.HasField("samples_digest") else None
    return {
        "committed_step": commit.step,
        "outcome": store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_"),
        "samples": commit.num_samples,
        "samples_digest": digest,
    }


def spec_hash(spec: JobSpec) -> str:
    """Return a hash of the specification with its defaults filled in: hex blake2b-128."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_manifest(directory: Path, content: Mapping[str, Any], keep: int) -> Path:
    """Write a manifest into a job's `directory` atomically and keep the newest `keep` of them.

    Raises `OSError`.
    """
    folder = directory / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"manifest-step{content['step']}.json"
    replace_file(path, json.dumps(content, indent=2) + "\n", sync=True)
    named = ((_MANIFEST_NAME.fullmatch(one.name), one) for one in folder.iterdir())
    there = {int(match[1]): one for match, one in named if match}
    for old in sorted(there)[:-keep]:
        there[old].unlink(missing_ok=True)
    return path
