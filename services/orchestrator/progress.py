"""How far a job has come: its steps, and what is due between them.

Each advance is durable before the next begins, so whoever takes the job over does what is missing
and nothing twice.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from services.orchestrator.context import JobContext
from services.orchestrator.engines import Engines
from services.orchestrator.evaluation import EvaluationRunner
from services.orchestrator.records import JobRecord
from services.orchestrator.sinks import Sinks
from services.orchestrator.steps import StepRunner
from services.orchestrator.training import Trainers
from troupe.rpc import TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch


class Progress:
    """Takes a job with bound policies and ready engines from step to step."""

    def __init__(
        self,
        job: JobContext,
        record: JobRecord,
        trainers: Trainers,
        engines: Engines,
        sinks: Sinks,
    ) -> None:
        self._job = job
        self._record = record
        self._trainers = trainers
        self._engines = engines
        self._sinks = sinks

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self._record.step >= self._job.spec.pipeline.steps

    @property
    def checkpoint_problem(self) -> pb.Problem | None:
        """Why the newest checkpoint is missing, if it is."""
        return self._record.checkpoint_problem

    async def step(self) -> None:
        """Do the next step."""
        step = self._record.step
        values = await StepRunner(self._job, self._engines, self._trainers, step).run()
        store = self._job.shared.store
        await store.finish_step(self._job.job_id, self._job.epoch, step, values)
        self._record = replace(self._record, step=step + 1)
        await self._copy(orch.MetricsLogged(step=step + 1, values=values))

    async def catch_up(self) -> bool:
        """Do what is due at this step and not done yet: a checkpoint, an evaluation. True."""
        spec, step = self._job.spec, self._record.step
        # Checkpoints first: an evaluation that fails must not cost one.
        if step > 0 and self._due(spec.checkpoint.every) and self._record.checkpointed != step:
            await self._checkpoint()
        due = step == 0 or self._due(spec.evaluation.every)
        if due and spec.evaluation.queries > 0 and self._record.evaluated != step:
            await self._evaluate()
        return True

    def _due(self, every: int) -> bool:
        return self.finished or (every > 0 and self._record.step % every == 0)

    async def _evaluate(self) -> None:
        record = self._record
        evaluation = EvaluationRunner(self._job, self._engines, record.step)
        values = await evaluation.run()
        name = "before" if record.step == 0 else "after" if self.finished else None
        fields = {} if name is None else {name: json.dumps(evaluation.tally.scores())}
        await self._job.shared.store.log_evaluation(
            record.job_id, self._job.epoch, record.evaluated, record.step, values, fields
        )
        self._record = replace(record, evaluated=record.step)
        await self._copy(orch.MetricsLogged(step=record.step, values=values))

    async def _checkpoint(self) -> None:
        """Save every trained policy. One that cannot be saved costs its checkpoint, not the job."""
        job, step = self._job, self._record.step
        job.show(f"saving checkpoints after step {step}", step=step)
        policies = job.spec.trained_policies
        results = await asyncio.gather(
            *(self._trainers.policies[policy].save_checkpoint() for policy in policies),
            return_exceptions=True,
        )
        problem: pb.Problem | None = None
        for policy, result in zip(policies, results, strict=True):
            what = f"checkpoint of {policy} after step {step}"
            if isinstance(result, TroupeError):
                problem = result.to_problem()
                problem.message = f"no {what}: {result.message}"
                await job.error(f"no {what}: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                await job.info(f"{what}: {result.path}")
        await job.shared.store.note_checkpoint(job.job_id, job.epoch, step, problem)
        self._record = replace(self._record, checkpointed=step, checkpoint_problem=problem)

    async def _copy(self, row: orch.MetricsLogged) -> None:
        for trouble in await self._sinks.write(row):
            await self._job.warn(f"metrics not copied: {trouble}")
