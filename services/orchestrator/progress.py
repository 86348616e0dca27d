"""How far a job has come: its steps, and what is due between them.

Each advance is durable before the next begins, so whoever takes the job over does what is missing
and nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from services.orchestrator.evaluation import NO_TURNS_REMEDY, EvaluationRunner
from services.orchestrator.faults import alongside
from services.orchestrator.manifests import manifest, write_manifest
from services.orchestrator.metrics import COMPLETED, WITHOUT_TURNS
from services.orchestrator.records import JobRecord
from services.orchestrator.sinks import Sinks
from services.orchestrator.step_rollout import Crew
from services.orchestrator.window import Window
from troupe.rpc import FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import trainer_pb2 as tr

# A job of which more trajectories made no turn at their endpoint is no plain success.
_WITHOUT_TURNS_SHARE: Final = 0.1


class Progress:
    """Takes a job with bound policies and ready engines from step to step."""

    def __init__(
        self, crew: Crew, record: JobRecord, sinks: Sinks, past: Iterable[orch.MetricsLogged] = ()
    ) -> None:
        """`past`: what was logged of the job before."""
        self._crew = crew
        self._job = crew.job
        self._record = record
        self._sinks = sinks
        self._population = crew.population
        self._judged = dict.fromkeys((COMPLETED, WITHOUT_TURNS), 0.0)
        for row in past:
            self._judge(row.values)
        self._window = Window(crew, record.step, self._finish)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or a population is complete before."""
        complete = self._population is not None and self._population.stopped
        return complete or self._record.step >= self._job.spec.pipeline.steps

    async def advance(self) -> None:
        """Do all steps up to the next one after which something is due, or those that are open
        after `close`."""
        if self.finished:
            return
        steps = self._window.run(self._next_due())
        if self._population is None:
            await steps
        else:
            await alongside(steps, self._population.watch())

    def close(self) -> None:
        """Begin no further step."""
        self._window.close()

    async def _finish(self, step: int, values: dict[str, float]) -> None:
        if self._population is not None:
            values |= self._population.metrics()
        self._judge(values)
        store = self._job.shared.store
        await store.finish_step(self._job.job_id, self._job.epoch, step, values)
        self._record = replace(self._record, step=step + 1)
        await self._copy(orch.MetricsLogged(step=step + 1, values=values))

    async def shortfall(self) -> TroupeError | None:
        """Why the job, all of whose steps are done, taught nothing; None: it did.

        Policies that alone were never updated are named in the job's log.
        """
        policies = self._job.spec.trained_policies
        if not policies or self._record.step == 0:
            return None
        completed, unused = self._judged[COMPLETED], self._judged[WITHOUT_TURNS]
        if unused and unused >= _WITHOUT_TURNS_SHARE * completed:
            return FailedPrecondition(
                f"{unused:.0f} of {completed:.0f} trajectories opened an endpoint and were "
                "rewarded, but made no turn: nothing of them was trained on",
                kind="no_turns",
                field="workflow",
                value=self._job.spec.workflow,
                remedy=NO_TURNS_REMEDY,
            )
        entries = await self._job.shared.ledger.entries(self._job.job_id)
        idle = [one for one in policies if one in entries and not entries[one].weights.version]
        if idle == list(policies):
            return FailedPrecondition(
                f"no policy was updated in {self._record.step} steps: no sample had a signal",
                kind="nothing_learned",
                field="policies",
                value=", ".join(idle),
                remedy="Rewards that are equal within every group teach nothing: look at "
                "`reward/*/mean`, at the trajectories, and at `troupe jobs audit` for why samples "
                "were dropped.",
            )
        if idle:
            steps = self._record.step
            await self._job.warn(f"not updated in any of {steps} steps: {', '.join(idle)}")
        return None

    def _judge(self, values: Mapping[str, float]) -> None:
        for name in self._judged:
            self._judged[name] += values.get(name, 0.0)

    def _next_due(self) -> int:
        """Steps after which an evaluation or checkpoints are due; at the latest the last."""
        spec, step = self._job.spec, self._record.step
        evaluations = spec.evaluation.every if spec.evaluation.queries else 0
        every = [one for one in (spec.checkpoint.every, evaluations) if one > 0]
        due = [(step // one + 1) * one for one in every]
        if self._population is not None:
            due.append(self._population.next_due(step))
        return min([spec.pipeline.steps, *due])

    async def catch_up(self) -> bool:
        """Do what is due at this step and not done yet: a checkpoint, an evaluation. True.

        Raises why the last checkpoint is missing, if it is: without it nobody gets what was
        learned. A resumed job tries it again.
        """
        spec, step = self._job.spec, self._record.step
        if self._population is not None:
            began = self._record.started_at or self._record.created_at
            await self._population.catch_up(
                step, finished=self.finished, seconds=time.time() - began
            )
        # Checkpoints first: an evaluation that fails must not cost one.
        if step > 0 and self._due(spec.checkpoint.every) and self._record.checkpointed != step:
            await self._checkpoint()
        due = step == 0 or self._due(spec.evaluation.every)
        if due and spec.evaluation.queries > 0 and self._record.evaluated != step:
            await self._evaluate()
        if self.finished and (problem := self._record.checkpoint_problem) is not None:
            raise TroupeError.from_problem(problem)
        return True

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self._record.step % every == 0)

    async def _evaluate(self) -> None:
        record = self._record
        evaluation = EvaluationRunner(self._job, self._crew.dispatch, record.step)
        values = await evaluation.run()
        name = "before" if record.step == 0 else "after" if self.finished else None
        fields = {} if name is None else {name: json.dumps(evaluation.tally.scores())}
        await self._job.shared.store.log_evaluation(
            record.job_id, self._job.epoch, record.evaluated, record.step, values, fields
        )
        self._record = replace(record, evaluated=record.step)
        await self._copy(orch.MetricsLogged(step=record.step, values=values))

    async def _checkpoint(self) -> None:
        """Save every trained policy. Before the last step one that cannot be saved costs its
        checkpoint, not the job."""
        job, step = self._job, self._record.step
        job.show(f"saving checkpoints after step {step}", step=step)
        policies = job.spec.trained_policies
        results = await asyncio.gather(
            *(self._crew.trainers.policies[policy].save_checkpoint() for policy in policies),
            return_exceptions=True,
        )
        problem: pb.Problem | None = None
        saved: dict[str, tr.SaveCheckpointResponse] = {}
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

    async def _write_manifest(self, saved: Mapping[str, tr.SaveCheckpointResponse]) -> None:
        """Say what belongs together. No step is open now, so that nothing moves meanwhile."""
        job, step = self._job, self._record.step
        request = es.GetStepRequest(job_id=job.job_id, step=step - 1, counts_only=True)
        last = await job.shared.experience.GetStep(request)
        entries = await job.shared.ledger.entries(job.job_id)
        weights = {policy: entries[policy].weights for policy in saved}
        content = manifest(job.spec, job.directory, step, last, weights, saved)
        try:
            await asyncio.to_thread(
                write_manifest, job.directory, content, job.spec.checkpoint.keep
            )
        except OSError as error:
            await job.error(f"no manifest of the checkpoints after step {step}: {error.strerror}")

    async def _copy(self, row: orch.MetricsLogged) -> None:
        for trouble in await self._sinks.write(row):
            await self._job.warn(f"metrics not copied: {trouble}")
