"""The progress of a running job: its steps, and the evaluations and checkpoints between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from services.orchestrator.errors import Deadline, run_all, run_with_background
from services.orchestrator.functions import mean_seconds
from services.orchestrator.jobs.checkpoints import best_value, keep_best, manifest, write_manifest
from services.orchestrator.jobs.sinks import Sinks
from services.orchestrator.jobs.stopping import EarlyEnd, EarlyEnds, RunClock
from services.orchestrator.pipeline.evaluation import EvaluationRunner
from services.orchestrator.pipeline.metrics import COMPLETED, JobTotals
from services.orchestrator.pipeline.steps import StepContext, StepWindow
from services.orchestrator.state.records import JobRecord
from troupe.job.metrics import evaluation_of_metric, evaluation_prefix, suggestion
from troupe.job.sections.run import EarlyStopSpec
from troupe.rpc import TroupeError
from troupe.twin.hints import split_hint
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Seconds between reports of a checkpoint's progress.
_PROGRESS_SECONDS: Final = 1.0


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
        past = list(past)
        self._totals = JobTotals(self._job.spec, past)
        self._window = StepWindow(context, record.step, self._finish)
        limit, trainers = self._job.spec.limits.job_seconds, context.trainers
        self.clock = RunClock(record.ran_seconds, limit, lambda: trainers.wait_for_others)
        self._ends = EarlyEnds(self._job.spec, record, self.clock)
        # Metrics of the newest step, if it is the last one that is done.
        rows = (row.values for row in reversed(past) if row.step == record.step)
        self._newest = next((dict(values) for values in rows if COMPLETED in values), {})
        # Whether the user was told that the metric of `stop` is missing.
        self._missed = False
        if self._ends.decided is not None:
            self._window.close()
        # Evaluations that are due and run concurrently with the next steps.
        self._concurrent: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the job ends early and no step is open, or a population is
        complete (`population.stop`)."""
        complete = self._population is not None and self._population.stopped
        ends = self._ends.decided is not None and self._window.idle
        return complete or ends or self._record.step >= self._job.spec.pipeline.steps

    async def watch_clock(self) -> None:
        """Count the time that the job runs, until cancelled."""
        job = self._job
        await self.clock.run(lambda now: job.shared.store.note_ran(job.job_id, job.epoch, now))

    async def advance(self) -> None:
        """Run the steps before the next evaluation or checkpoint; after `close`, only the open
        ones."""
        if self.finished:
            return
        steps = run_all(self._evaluate_concurrently(), self._window.run(self._next_due()))
        if self._population is None:
            await steps
        else:
            await run_with_background(steps, self._population.watch())

    async def _evaluate_concurrently(self) -> None:
        """Run the evaluations that `catch_up` left, concurrently with the next steps' rollouts."""
        if due := self._concurrent:
            with self._context.hold.during(len(due)):
                self._concurrent = ()
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
        end, fields = self._ends.look(values, step + 1)
        if end is not None:
            self._window.close()
        await store.finish_step(self._job.job_id, self._job.epoch, step, values, _texts(fields))
        profile = self._context.profile
        profile.end_step(values)
        profile.device_classes = self._context.engines.device_classes
        profile.tools |= await mean_seconds(self._job.shared.reward, self._job.job_id)
        await store.keep_profile(self._job.job_id, profile)
        await self._hint(values)
        self._record, self._newest = replace(self._record, step=step + 1), values
        await self._write_to_sinks(orchestrator_pb.MetricsLogged(step=step + 1, values=values))
        await self._take(end, fields, values)

    async def _take(
        self, end: EarlyEnd | None, fields: Mapping[str, Any], values: Mapping[str, float]
    ) -> None:
        """Act on the decision that was written with a row of metrics, and tell the user."""
        news = end is not None and self._ends.decided is None
        self._ends.take(end, fields)
        if news and end is not None and not self._is_last:
            await self._job.info(f"the job ends early: {end.text}")
        stop = self._job.spec.stop
        if stop is None or self._missed or stop.metric in values:
            return
        alike = (
            any(
                one.startswith(evaluation_prefix(evaluation_of_metric(stop.metric)))
                for one in values
            )
            if stop.of_evaluation
            else COMPLETED in values
        )
        if alike:
            self._missed = True
            await self._job.warn(
                f"stop.metric: this step or evaluation has no `{stop.metric}`; "
                + suggestion(stop.metric, values)
            )

    async def _hint(self, values: Mapping[str, float]) -> None:
        """Tell the user once about each change that would shorten the steps, and about each thing
        that bounds them."""
        if not (hint := split_hint(values)):
            return
        change = hint.partition(": ")[2].partition(" would")[0] or hint
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
        if self._keeps_steps:
            due.append(step + 1)
        if self._population is not None:
            due.append(self._population.next_due(step))
        return min([spec.pipeline.steps, *due])

    @property
    def _is_last(self) -> bool:
        return self._record.step >= self._job.spec.pipeline.steps

    @property
    def _keeps_steps(self) -> bool:
        """Whether the checkpoint of any step may be the best one."""
        best = self._job.spec.best
        return isinstance(best, EarlyStopSpec) and not best.of_evaluation

    async def catch_up(self) -> None:
        """Write the checkpoints and run the evaluation that are due after this step. In mode
        `async`, `advance` runs evaluations, except the last one.

        Raises the error of the last checkpoint if it could not be written, since the training
        result would be lost. A resumed job tries again.
        """
        spec, step = self._job.spec, self._record.step
        await self._window.look()
        if self._ends.decided is not None and not self.finished:
            return  # the open steps of an earlier runner come first, then the end
        if self._population is not None:
            await self._population.catch_up(
                step, finished=self.finished, seconds=self._record.seconds_since_start
            )
        # Checkpoints first, so that a failing evaluation does not cost one.
        if step > 0 and self._due(spec.checkpoint.every) and self._record.checkpointed != step:
            await self._checkpoint()
        if self._keeps_steps:
            newest = await self._job.shared.weight_versions.newest(self._job.job_id)
            versions = {policy: float(one.weights.version) for policy, one in newest.items()}
            await self._keep_best(self._newest, versions)
        due = [
            name for name, one in spec.evaluation_sets.items() if step == 0 or self._due(one.every)
        ]
        if due and self._record.evaluated != step:
            if spec.pipeline.mode == "async" and not self.finished:
                # Trainers will have continued by the time the evaluation tells whether these
                # weights are the best.
                if spec.best and step > 0 and self._record.checkpointed != step:
                    await self._checkpoint()
                self._concurrent = tuple(due)
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
        left = dict.fromkeys(self._job.spec.evaluation_sets)
        end, fields = None, dict[str, Any]()
        names = list(names)
        while names:
            for one in names:
                del left[one]
                items = self._context.engines.evaluation_items.get(one)
                runner = EvaluationRunner(self._job, self._context.dispatch, step, one, items)
                found, compared = await runner.run()
                # The evaluated versions, since scores are compared over versions.
                prefix = evaluation_prefix(one)
                values |= found
                values |= {f"{prefix}version/{p}": version for p, version in versions.items()}
                scores |= compared
            end, fields = self._ends.look(values, step)
            if end is not None:
                self._window.close()
            # If the job ends here, this is its final evaluation, with all of its sets.
            names = list(left) if end is not None and self._window.idle else []
        if not self._keeps_steps:
            await self._keep_best(values, versions)
        record, store = self._record, self._job.shared.store
        last = self.finished or (end is not None and self._window.idle)
        name = "before" if record.step == 0 else "after" if last else None
        texts = _texts(fields) | ({} if name is None else {name: json.dumps(scores)})
        await store.log_evaluation(
            record.job_id, self._job.epoch, record.evaluated, record.step, values, texts
        )
        self._record = replace(record, evaluated=record.step)
        await self._write_to_sinks(orchestrator_pb.MetricsLogged(step=record.step, values=values))
        await self._take(end, fields, values)

    async def _keep_best(self, values: Mapping[str, float], versions: Mapping[str, float]) -> None:
        """Keep the checkpoint of this step if it evaluated better than all before it.

        `versions`: evaluated versions by policy.
        """
        job, step, best = self._job, self._record.step, self._job.spec.best
        stop = job.spec.stop
        if best is None or step == 0:
            return
        value = values.get(best.metric)
        if value is None and isinstance(best, EarlyStopSpec):
            return  # `_take` says so
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
                keep_best,
                job.directory,
                step,
                versions,
                best.metric,
                value,
                exported=stop is not None and stop.best == "exported",
            )
        except OSError as error:
            await job.error(f"the best checkpoint, after step {step}, could not be kept: {error}")
            return
        if not kept:
            await job.warn(
                f"the evaluation after step {step} was repeated with newer weights than the "
                "checkpoint after that step, so it does not count for the best checkpoint"
            )
            return
        kept_versions = {policy: int(versions[policy]) for policy in job.spec.trained_policies}
        content = {"metric": best.metric, "value": value, "step": step, "versions": kept_versions}
        await job.shared.store.note_best(job.job_id, job.epoch, content)
        await job.info(f"the checkpoint after step {step} is the best: {best.metric} = {value:g}")

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


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return fields of the job's record as it stores them."""
    return {name: json.dumps(value) for name, value in fields.items()}
