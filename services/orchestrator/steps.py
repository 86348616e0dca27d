"""One training step: open it, roll it out, train each policy, bring engines up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from services.orchestrator.context import JobContext
from services.orchestrator.dispatch import Dispatch
from services.orchestrator.engines import Engines
from services.orchestrator.evaluation import check_failures, report_failures
from services.orchestrator.faults import Patience, together
from services.orchestrator.metrics import Tally, commit_metrics
from services.orchestrator.training import Trainers
from services.orchestrator.trajectories import as_event
from troupe.rpc import new_id
from troupe.scheduling import admission
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import rollout_pb2 as ro


class StepRunner:
    """Runs one step of a job in the job's pipeline mode.

    The step may have been begun before a crash: trajectories that ended then are not run again,
    and policies that committed are not trained again.
    """

    def __init__(
        self,
        job: JobContext,
        engines: Engines,
        trainers: Trainers,
        step: int,
    ) -> None:
        self._job = job
        self._engines = engines
        self._trainers = trainers
        self._step = step
        pipeline = job.spec.pipeline
        self._mode = pipeline.mode
        self._plan = admission.plan_step(
            job_seed=job.spec.seed,
            step=step,
            queries_per_step=pipeline.queries_per_step,
            group_size=pipeline.group_size,
        )
        self._total = pipeline.queries_per_step * pipeline.group_size
        self._name = f"step {step + 1}"
        self._patience = Patience(self._name, job.spec.limits.step_seconds, "limits.step_seconds")
        # Trajectories of the step that have ended, those before a restart included.
        self._over = 0
        # Of those before, the ones that failed: a job that was resumed must not fail over them
        # again, their cause may be mended.
        self._forgiven = 0
        self._begun = self._total
        # Commits that the store knew when this runner came to the step; all of them.
        self._found: dict[str, es.StepCommit] = {}
        self._commits: dict[str, es.StepCommit] = {}
        # What the rows of this step were or will be generated with.
        self._versions: dict[str, int] = {}
        self._tally = Tally(job.spec.agents, self._versions)
        self._recent = job.shared.trajectories.buffer(job.job_id, step, evaluation=False)
        self._rollout_seconds = 0.0
        self._served = asyncio.Event()

    async def run(self) -> dict[str, float]:
        """The step's metrics, when every policy has committed it and engines serve the result.

        Raises `TroupeError`: a fault of the job, or `DeadlineExceeded` naming what was missing.
        """
        began = time.monotonic()
        ended = await self._open()
        self._over = len(ended)
        for kept in await self._job.shared.trajectories.find(self._job.job_id, ended):
            self._tally.add(as_event(kept), timed=False)
        self._begun = self._total - len(ended)
        self._forgiven = self._tally.failed
        rollout = self._roll_out(ended)
        policies = self._job.spec.trained_policies
        ticker = asyncio.create_task(self._tick())
        try:
            if self._mode == "micro_batch":
                await together(rollout, *(self._train(policy) for policy in policies))
            else:
                await rollout
                if self._mode == "serial":
                    for policy in policies:
                        await self._train(policy)
                else:
                    await together(*(self._train(policy) for policy in policies))
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            await self._recent.flush()
        await report_failures(self._job, self._name, self._tally, self._total)
        values = self._tally.values(self._rollout_seconds)
        if unseen := self._total - self._tally.ended:
            # Ended in the store just before a worker or an orchestrator could tell.
            values["trajectories/unseen"] = float(unseen)
        values |= commit_metrics(self._commits.values())
        values["step/seconds"] = time.monotonic() - began
        return values

    async def _open(self) -> frozenset[str]:
        """Admit the step durably; which of its trajectories have ended already."""
        store, job_id = self._job.shared.experience, self._job.job_id
        found = await store.GetStep(es.GetStepRequest(job_id=job_id, step=self._step))
        self._found = {commit.policy: commit for commit in found.commits}
        self._versions.update(
            found.versions
            if found.open
            else {
                policy: self._trainers.policies[policy].weights.version
                for policy in self._job.spec.trained_policies
            }
        )
        response = await store.OpenStep(
            es.OpenStepRequest(
                request_id=new_id("open"),
                job_id=job_id,
                step=self._step,
                versions=self._versions,
                query_ids=[query.query_id for query in self._plan],
                group_size=self._job.spec.pipeline.group_size,
            )
        )
        return frozenset(response.ended_trajectory_ids)

    async def _roll_out(self, ended: Collection[str]) -> None:
        groups = [group for query in self._plan if (group := train_tickets(query, ended))]
        if not groups:
            return
        began = time.monotonic()
        dispatch = Dispatch(
            self._job, self._engines, self._step, self._patience, self._on_end, self._ended
        )
        await dispatch.run(groups)
        self._rollout_seconds = time.monotonic() - began

    def _on_end(self, event: ro.TrajectoryEvent) -> None:
        self._over += 1
        self._tally.add(event)
        self._recent.add(event)
        check_failures(self._job, self._name, self._tally, self._begun, forgiven=self._forgiven)

    async def _ended(self) -> Collection[str]:
        request = es.GetStepRequest(job_id=self._job.job_id, step=self._step)
        found = await self._job.shared.experience.GetStep(request)
        return frozenset(found.ended_trajectory_ids)

    async def _train(self, policy: str) -> None:
        """Commit the policy's step; the ledger moves, engines load what is new."""
        trainer = self._trainers.policies[policy]
        before = trainer.weights.version
        if (found := self._found.get(policy)) is not None:
            commit = trainer.adopt(found)
        else:
            commit = await trainer.run_step(self._step, self._patience)
        await self._job.shared.ledger.commit(self._job.job_id, commit)
        if commit.outcome == es.STEP_OUTCOME_SKIPPED:
            await self._job.warn(
                f"{self._name}: {policy} skipped its update, its weights stay: {commit.reason}"
            )
        elif commit.outcome == es.STEP_OUTCOME_EMPTY:
            await self._job.warn(f"{self._name}: there was no sample for {policy}")
        if trainer.weights.version != before:
            await self._engines.update(trainer.weights, self._patience)
        self._commits[policy] = commit

    async def _tick(self) -> None:
        """Tell followers of progress, and write trajectories, now and then."""
        while True:
            self._job.show(
                self._describe(),
                step=self._step + 1,
                done=self._over,
                total=self._total,
            )
            await asyncio.sleep(self._job.shared.settings.activity_seconds)
            await self._recent.flush()

    def _describe(self) -> str:
        trained = self._job.spec.trained_policies
        busy = sum(self._trainers.policies[policy].progress is not None for policy in trained)
        total = self._job.spec.pipeline.steps
        parts = [f"{self._over} of {self._total} trajectories"]
        if busy:
            parts.append(f"{busy} of {len(trained)} policies training")
        if self._commits:
            parts.append(f"{len(self._commits)} committed")
        if self._over < self._total and not self._engines.ready():
            parts.append("waiting for a rollout worker")
        if unbound := [p for p in trained if self._trainers.policies[p].worker is None]:
            parts.append(f"waiting for a trainer worker for {', '.join(unbound)}")
        return f"step {self._step + 1}/{total}: {', '.join(parts)}"


def train_tickets(query: admission.QueryPlan, ended: Collection[str]) -> list[ro.Ticket]:
    """Tickets for the trajectories of a query that have not ended."""
    return [
        ro.Ticket(
            query_id=query.query_id,
            trajectory_id=trajectory_id,
            split="train",
            index=query.index,
            seed=seed,
            purpose=ro.Ticket.PURPOSE_TRAIN,
        )
        for trajectory_id, seed in zip(query.trajectory_ids, query.seeds, strict=True)
        if trajectory_id not in ended
    ]
